"""Base of tasks of images: how the uint8 images of a batch become the models' inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from big_vision.input.images.labelled import ImageFacts
from big_vision.input.source import require_facts
from big_vision.pp.checks import require_valid_spec
from big_vision.pp.device_ops import require_equal_ranges, require_range, split_device_ops
from datasets import ImageBatch
from models.transforms import create_input_transform, to_pixels
from tasks.images.erasing import Erasing
from tasks.images.mixing import Mixing
from tasks.images.resizing import Resizing, get_only_side
from tasks.teachers.taught import CachedTask
from tasks.teachers.teaching import TeacherT
from utils.errors import UserError

if TYPE_CHECKING:
    from torch import nn

    from tasks.protocol import Loaders, TaskFacts
    from utils.config.load import RunConfig
    from utils.json_types import JsonObject


class ImageTask(CachedTask[ImageBatch, TeacherT]):
    """Erases, mixes, resizes and normalises images; `transform`: pixels -> the student's input."""

    unit = ("img", 1)

    def __init__(self, config: RunConfig, facts: TaskFacts, loaders: Loaders) -> None:
        self.config, self.facts, self._loaders = config, facts, loaders
        source = config.data.source
        self._images = {
            r: require_facts(loader.facts, ImageFacts, source) for r, loader in loaders.items()
        }
        seen = self._images.get("train", self._images["eval"])
        self.transform = create_input_transform(*seen.normalisation, channels=seen.known_shape[2])
        steps_per_epoch = loaders["train"].batches_per_epoch if "train" in loaders else 0
        self.mixing = Mixing(config.train, steps_per_epoch)
        self.resizing = Resizing(config.train, seen.known_shape[0], steps_per_epoch)
        data, seed = config.data, config.train.seed
        self.erasing = Erasing(data.random_erasing, seed, data.erasing_mode)

    def create_inputs(self, examples: int) -> Tensor:
        height, width, channels = self._images["train"].known_shape
        side = get_only_side(self.config.train.image_sizes)
        return torch.zeros(examples, channels, side or height, side or width)

    def get_values(self, step: int) -> dict[str, Tensor]:
        return super().get_values(step) | self.resizing.get_values(step)

    def get_modules(self) -> dict[str, nn.Module]:
        return {**super().get_modules(), "transform": self.transform}

    def list_future_shapes(
        self, step: int, total_steps: int, batch: ImageBatch
    ) -> list[ImageBatch]:
        return self.resizing.list_future_shapes(step, total_steps, batch)

    def augment(self, images: Tensor, draws: Mapping[str, Tensor]) -> Tensor:
        """Return pixels [B, C, H, W] of 0..255 of uint8 [B, H, W, C], erased and then mixed."""
        mean, std = self.transform.mean, self.transform.std
        pixels = self.erasing.erase_pixels(to_pixels(images), draws, mean, std)
        return self.mixing.mix_pixels(pixels, draws)

    def sample(self, step: int) -> dict[str, Tensor]:
        loader = self._loaders["train"]
        size, image_size = loader.global_batch_size, self._images["train"].known_shape[:2]
        drawn: dict[str, Tensor] = {}
        for augmentation in (self.mixing, self.erasing):
            if augmentation.active:
                drawn |= augmentation.sample(step, size, image_size)
        start = loader.shard[0] * loader.rank_batch_size
        block = slice(start, start + loader.rank_batch_size)
        return {name: value[block] for name, value in drawn.items()}


def check_strings(config: RunConfig) -> None:
    """Refuse invalid strings, and other scales of pixels in evaluation than in training."""
    strings = config.data.train_strings
    for key, spec in {**strings, "data.eval_pp": config.data.eval_pp}.items():
        require_valid_spec(spec, key)
    if config.run.eval_only:
        require_range(config.data.eval_pp, "data.eval_pp")
        return
    for key, spec in strings.items():
        require_equal_ranges(spec, config.data.eval_pp, train_key=key)


def check_pairs(config: RunConfig, examples: int, devices: int) -> None:
    """Refuse `examples` of one device's micro-batch that are not whole pairs if pairs are mixed."""
    batch, parts = config.data.global_batch_size, config.train.known_parts
    if examples % 2 and (config.train.mixup_alpha > 0 or config.train.cutmix_alpha > 0):
        raise UserError(
            f"data.global_batch_size ({batch}) leaves {examples} examples for the micro-batch of "
            f"each of {devices} devices, but mixup and cutmix need pairs; use a multiple of "
            f"{2 * parts * devices}, or set mixup_alpha and cutmix_alpha to 0"
        )


def describe_student(config: RunConfig, classes: int) -> JsonObject:
    """Describe how to create the student again, and its input; 0 classes: it gives features."""
    arguments = dict(config.model.args)
    if config.model.image_size is not None:
        arguments["img_size"] = config.model.image_size
    mean, std = split_device_ops(config.data.eval_pp)[1]
    return {
        "model": config.model.name,
        "args": arguments,
        "num_classes": classes,
        "mean": list(mean),
        "std": list(std),
        "eval_pp": config.data.eval_pp,
    }
