"""What is handed over: a model as one function of images, and real images to judge it by."""

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
_SIZES = (1, 3)  # of the first batches that a program of any size is asked about


class Servable(nn.Module):
    """A model with or without what normalises its input, in eval mode.

    Args:
      normalize: whether it takes pixels of 0..255; else what the model takes.
    """

    def __init__(self, trained: TrainedModel, *, normalize: bool) -> None:
        super().__init__()
        self.transform = trained.create_transform() if normalize else nn.Identity()
        self.model = trained.model
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Float32 answers [B, K], as `Handover.output` names them, of images [B, C, H, W]."""
        return self.model(self.transform(images))


@dataclass(frozen=True)
class Handover:
    """All that a form is written from.

    Attributes:
      images: float32 [N, C, H, W], real ones, as the program takes them.
      batch: images at once; none: any number.
      normalize: whether it takes pixels of 0..255.
    """

    trained: TrainedModel
    images: Tensor
    batch: int | None
    normalize: bool

    @property
    def output(self) -> str:
        """What answers are: of a model without a classifier its pooled features."""
        return "logits" if self.trained.num_classes else "features"

    @cached_property
    def servable(self) -> Servable:
        """The model as the program calls it."""
        return Servable(self.trained, normalize=self.normalize)

    @cached_property
    def program(self) -> ExportedProgram:
        """Traced for the batch, or for any."""
        return self.trace(self.batch)

    def trace(self, batch: int | None) -> ExportedProgram:
        """The whole program, of a fixed batch or of any.

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

    def answer(self) -> np.ndarray:
        """The model's own answers [N, K] to the images, in PyTorch on the CPU."""
        with torch.no_grad():
            answers = self.servable(self.images).numpy()
        if not np.isfinite(answers).all():
            raise UserError(
                f"{self.trained.location} gives answers that are not finite; nothing is exported, "
                "give other weights or another --pp"
            )
        return answers

    def cut(self, batch: int | None) -> list[np.ndarray]:
        """The images in batches of a size; without one, of sizes that differ."""
        images = self.images
        if batch is not None:
            wanted = -(-len(images) // batch) * batch
            images = images[torch.arange(wanted) % len(images)]
            return [part.numpy() for part in images.split(batch)]
        rest = len(images) - sum(_SIZES)
        sizes = [*_SIZES, rest] if rest > 0 else [len(images)]
        return [part.numpy() for part in images.split(sizes)]

    def describe_input(self) -> JsonObject:
        """Shape, range and preparation of the input, for whoever calls the model."""
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
