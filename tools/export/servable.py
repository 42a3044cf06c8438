"""A model as a function of images, and real images to compare exports on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from utils.errors import UserError
from utils.json_types import JsonObject

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from models.trained import TrainedModel

INPUT = "images"
_SIZES = (1, 3)  # of the first batches that a program of any batch size is compared on


class Servable(nn.Module):
    """A model in eval mode, with the normalisation of pixels of 0..255 if `normalize`."""

    def __init__(self, trained: TrainedModel, *, normalize: bool) -> None:
        super().__init__()
        self.transform = trained.create_transform() if normalize else nn.Identity()
        self.model = trained.model
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Return float32 outputs [B, K] (see `Handover.output`) of images [B, C, H, W]."""
        return self.model(self.transform(images))


@dataclass(frozen=True)
class Handover:
    """Input of every form."""

    trained: TrainedModel
    images: Tensor  # float32 [N, C, H, W], real ones, in the range that the program takes
    batch: int | None  # images at once; None for any number
    normalize: bool  # whether the program takes pixels of 0..255

    @property
    def output(self) -> str:
        """Name of the output: pooled features if the model has no classifier."""
        return "logits" if self.trained.num_classes else "features"

    @cached_property
    def servable(self) -> Servable:
        """The model as a function of images."""
        return Servable(self.trained, normalize=self.normalize)

    @cached_property
    def program(self) -> ExportedProgram:
        """The program, traced for `batch`."""
        return self.trace(self.batch)

    def trace(self, batch: int | None) -> ExportedProgram:
        """Trace the program for a fixed batch size, or for any if None.

        Raises:
          UserError: the model cannot be traced.
        """
        size = batch or 2  # PyTorch makes a constant of an axis of length 1
        example = self.images[torch.arange(size) % len(self.images)]
        shapes = {INPUT: {0: torch.export.Dim("batch")}} if batch is None else None
        try:
            return torch.export.export(self.servable, (example,), dynamic_shapes=shapes)
        except (torch._dynamo.exc.TorchDynamoException, RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"WEIGHTS: {self.trained.name} cannot be traced ({reason}); give --batch-size, "
                "which fixes its shapes, or the form timm, which needs no program"
            ) from error

    def compute_outputs(self) -> np.ndarray:
        """Compute the model's own outputs [N, K] of the images, in PyTorch on the CPU."""
        with torch.no_grad():
            outputs = self.servable(self.images).numpy()
        if not np.isfinite(outputs).all():
            raise UserError(
                f"{self.trained.location} gives outputs that are not finite; nothing is exported, "
                "give other weights or another --pp"
            )
        return outputs

    def cut(self, batch: int | None) -> list[np.ndarray]:
        """Split the images into batches of a size; if None, of sizes that differ."""
        images = self.images
        if batch is not None:
            wanted = -(-len(images) // batch) * batch
            images = images[torch.arange(wanted) % len(images)]
            return [part.numpy() for part in images.split(batch)]
        rest = len(images) - sum(_SIZES)
        sizes = [*_SIZES, rest] if rest > 0 else [len(images)]
        return [part.numpy() for part in images.split(sizes)]

    def describe_input(self) -> JsonObject:
        """Describe shape, range and preprocessing of the input, for callers of the model."""
        height, width, channels = self.trained.image_shape
        transform = self.trained.create_transform()
        return {
            "name": INPUT,
            "shape": ["batch" if self.batch is None else self.batch, channels, height, width],
            "type": "float32",
            "range": "pixels of 0 to 255" if self.normalize else "(pixels - mean) / std",
            "mean": transform.mean.flatten().tolist(),
            "std": transform.std.flatten().tolist(),
            "eval_pp": self.trained.pp,
        }
