"""Mixup and cutmix of neighbouring examples: drawn on the host, applied on the device.

Examples 2j and 2j+1 of the global batch are mixed with each other, by coefficients of the pair, of
the example or of the batch, which travel with the batch as data. So one graph serves every step,
and the result does not depend on the number of ranks or micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tasks.images.boxes import compute_inside

if TYPE_CHECKING:
    from utils.config.train import TrainSection

LAM, BLEND, BOX = "mix_lam", "mix_blend", "mix_box"


class Mixing:
    """Draws coefficients for a step and mixes images and targets by them.

    Args:
      section: its keys mixup_alpha, cutmix_alpha, label_smoothing, seed and those named mix.
      steps_per_epoch: that mix_off_epoch counts in.
    """

    def __init__(self, section: TrainSection, steps_per_epoch: int = 0) -> None:
        self.section = section
        off = section.mix_off_epoch
        self._off_step = None if off is None else round(off * steps_per_epoch)
        self.active = section.mixup_alpha > 0 or section.cutmix_alpha > 0

    def sample(
        self, step: int, global_batch_size: int, image_size: tuple[int, int]
    ) -> dict[str, Tensor]:
        """Coefficients of the whole global batch, a function of (seed, step) alone.

        Returns:
          `mix_lam` [B] share of the own label, `mix_blend` [B] share of the own pixels outside
          the box, `mix_box` [B, 4] rows y0, y1 and columns x0, x1 that the partner fills.
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
        return {
            LAM: _share(lam, shared),
            BLEND: _share(blend, shared),
            BOX: _share(boxes, shared),
        }

    def mix_pixels(self, pixels: Tensor, draws: Mapping[str, Tensor]) -> Tensor:
        """Mixed images of the same shape [B, C, H, W]; unchanged where nothing is mixed."""
        if not self.active:
            return pixels
        partner = _swap_neighbours(pixels)
        blend = draws[BLEND].view(-1, 1, 1, 1)
        inside = compute_inside(draws[BOX], tuple(pixels.shape[2:]))
        return torch.where(inside, partner, pixels * blend + partner * (1.0 - blend))

    def mix_targets(self, labels: Tensor, num_classes: int, draws: Mapping[str, Tensor]) -> Tensor:
        """Float32 [B, K] targets that sum to 1: smoothed, then mixed like the pixels.

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
    """Beta(alpha, alpha) draws, or ones where the kind of mixing is off."""
    return rng.beta(alpha, alpha, count) if alpha > 0 else np.ones(count)


def _draw_boxes(
    rng: np.random.Generator, area: np.ndarray, image_size: tuple[int, int]
) -> np.ndarray:
    """Boxes [n, 4] of the image's shape and that area around centres that lie evenly."""
    centres = [np.floor(rng.random(len(area)) * size) for size in image_size]
    return cut_boxes(np.stack(centres, axis=1), area, image_size)


def cut_boxes(centres: np.ndarray, area: np.ndarray, image_size: tuple[int, int]) -> np.ndarray:
    """Boxes [n, 4] (y0, y1, x0, x1) of the image's shape, cut at its borders.

    An odd side has its further pixel behind the centre.

    Args:
      centres: [n, 2] row and column, whole numbers.
      area: [n] share of the image.

    Source: Yun et al. 2019, arXiv:1905.04899, section 3.1; odd sides as timm 1.0.31 has them.
    """
    sides = []
    for centre, size in zip(centres.T, image_size, strict=True):
        length = np.floor(size * np.sqrt(area))
        sides += [
            np.clip(centre - np.floor(length / 2), 0, size),
            np.clip(centre + np.ceil(length / 2), 0, size),
        ]
    return np.stack(sides, axis=1)


def _share(values: np.ndarray, count: int) -> Tensor:
    """Float32, each row for as many examples as share it."""
    return torch.from_numpy(np.repeat(values.astype(np.float32), count, axis=0))


def _swap_neighbours(values: Tensor) -> Tensor:
    """Rows in the order 1, 0, 3, 2, ...; the number of rows is even."""
    paired = values.unflatten(0, (math.floor(values.shape[0] / 2), 2))
    return torch.flip(paired, dims=(1,)).flatten(0, 1)
