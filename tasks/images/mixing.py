"""Mixup and cutmix of neighbouring examples: drawn on the host, applied on the device.

Examples 2j and 2j+1 of the global batch are mixed with each other, by coefficients of the pair, of
the example or of the batch, which travel with the batch as data. So one graph serves every step,
and the result does not depend on the number of ranks or micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from utils.config.train import TrainSection


def compute_inside(boxes: Tensor, image_size: Sequence[int]) -> Tensor:
    """Return bool [B, 1, H, W]: the pixels in each example's box; one graph for all boxes.

    Boxes are float [B, 4], y0 <= row < y1 and x0 <= column < x1; an empty box holds no pixel.
    """
    height, width = image_size
    rows = torch.arange(height, device=boxes.device, dtype=torch.float32).view(1, -1, 1)
    columns = torch.arange(width, device=boxes.device, dtype=torch.float32).view(1, 1, -1)
    box = boxes.view(-1, 4, 1, 1)
    inside = (rows >= box[:, 0]) & (rows < box[:, 1])
    return (inside & (columns >= box[:, 2]) & (columns < box[:, 3])).unsqueeze(1)


LAM, BLEND, BOX = "mix_lam", "mix_blend", "mix_box"


class Mixing:
    """Draws coefficients for a step and mixes images and targets by them."""

    def __init__(self, section: TrainSection, steps_per_epoch: int = 0) -> None:
        self.section = section
        off = section.mix_off_epoch
        self._off_step = None if off is None else round(off * steps_per_epoch)
        self.active = section.mixup_alpha > 0 or section.cutmix_alpha > 0

    def sample(
        self, step: int, global_batch_size: int, image_size: tuple[int, int]
    ) -> dict[str, Tensor]:
        """Return coefficients of the whole global batch, a function of (seed, step) alone.

        They are `mix_lam` [B] share of the own label, `mix_blend` [B] share of the own pixels
        outside the box, `mix_box` [B, 4] rows y0, y1 and columns x0, x1 that the partner fills.
        """
        section = self.section
        shared = {"pair": 2, "element": 1, "batch": global_batch_size}[section.mix_mode]
        count = global_batch_size // shared
        rng = np.random.Generator(np.random.Philox(key=[section.seed, step]))
        is_on = self._off_step is None or step < self._off_step
        mixed = (rng.random(count) < section.mix_prob) & is_on
        cut_share = section.cutmix_prob if section.mixup_alpha > 0 else 1.0
        cut = (rng.random(count) < cut_share) & (section.cutmix_alpha > 0)
        blend = _draw_beta(rng, section.mixup_alpha, count)
        area = _draw_beta(rng, section.cutmix_alpha, count)
        boxes = _draw_boxes(rng, 1.0 - area, image_size)
        boxes[~(mixed & cut)] = 0
        blend[~mixed | cut] = 1.0
        height, width = image_size
        covered = (boxes[:, 1] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 2]) / (height * width)
        lam = np.where(cut, 1.0 - covered, blend)
        return {LAM: _share(lam, shared), BLEND: _share(blend, shared), BOX: _share(boxes, shared)}

    def mix_pixels(self, pixels: Tensor, draws: Mapping[str, Tensor]) -> Tensor:
        """Return mixed images [B, C, H, W]; unchanged if mixing is off."""
        if not self.active:
            return pixels
        partner = _swap_neighbours(pixels)
        blend = draws[BLEND].view(-1, 1, 1, 1)
        inside = compute_inside(draws[BOX], pixels.shape[2:])
        return torch.where(inside, partner, pixels * blend + partner * (1.0 - blend))

    def mix_targets(self, labels: Tensor, num_classes: int, draws: Mapping[str, Tensor]) -> Tensor:
        """Return float32 [B, K] targets that sum to 1: smoothed, then mixed like the pixels.

        Labels [B, K], a 1 for each of several, sum to anything. Smoothing spreads `label_smoothing`
        over all K classes (as timm and PyTorch do).
        """
        smoothing = self.section.label_smoothing
        if labels.dim() == 1:
            classes = torch.arange(num_classes, device=labels.device, dtype=labels.dtype)
            labels = labels.unsqueeze(1) == classes
        targets = labels.to(torch.float32) * (1.0 - smoothing) + smoothing / num_classes
        if not self.active:
            return targets
        lam = draws[LAM].unsqueeze(1)
        return targets * lam + _swap_neighbours(targets) * (1.0 - lam)


def _draw_beta(rng: np.random.Generator, alpha: float, count: int) -> np.ndarray:
    return rng.beta(alpha, alpha, count) if alpha > 0 else np.ones(count)


def _draw_boxes(
    rng: np.random.Generator, area: np.ndarray, image_size: tuple[int, int]
) -> np.ndarray:
    centres = [np.floor(rng.random(len(area)) * size) for size in image_size]
    return cut_boxes(np.stack(centres, axis=1), area, image_size)


def cut_boxes(centres: np.ndarray, area: np.ndarray, image_size: tuple[int, int]) -> np.ndarray:
    """Return boxes [n, 4] (y0, y1, x0, x1) of the image's shape, cut at its borders.

    An odd side has its extra pixel behind the centre. `centres` are [n, 2] row and column, whole
    numbers, `area` [n] is the share of the image.

    Source: Yun et al. 2019, arXiv:1905.04899, section 3.1; odd sides as in timm 1.0.31.
    """
    sides: list[np.ndarray] = []
    for centre, size in zip(centres.T, image_size, strict=True):
        length = np.floor(size * np.sqrt(area))
        sides += [
            np.clip(centre - np.floor(length / 2), 0, size),
            np.clip(centre + np.ceil(length / 2), 0, size),
        ]
    return np.stack(sides, axis=1)


def _share(values: np.ndarray, count: int) -> Tensor:
    """Return float32 values, each row repeated for the examples that share it."""
    return torch.from_numpy(np.repeat(values.astype(np.float32), count, axis=0))


def _swap_neighbours(values: Tensor) -> Tensor:
    """Return rows in the order 1, 0, 3, 2 and so on; the number of rows is even."""
    paired = values.unflatten(0, (math.floor(values.shape[0] / 2), 2))
    return torch.flip(paired, dims=(1,)).flatten(0, 1)
