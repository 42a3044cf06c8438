"""Random erasing: a rectangle of each chosen example is filled, drawn on the host as data."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from losses.noise import draw_normal
from tasks.images.mixing import compute_inside

ERASE_BOX = "erase_box"
# What the noise of each example is a function of, where erased pixels are noise.
ERASE_KEY = "erase_key"
_AREA, _ASPECT, _TRIES = (0.02, 1 / 3), (0.3, 1 / 0.3), 10
_SALT = 0x45524153  # keeps these draws apart from those of mixing


class Erasing:
    """Draws and fills one rectangle for each chosen example of a step.

    `probability` is the share of the examples that lose a rectangle. `mode` "const" fills it with
    the mean pixel; "pixel" with noise: for each pixel and channel a number that is normal with mean
    0 and variance 1 after normalisation.

    Source: Zhong et al. 2017, arXiv:1708.04896, with timm's ranges: area 0.02 to 1/3 of the image,
    aspect ratio log-uniform between 0.3 and 1/0.3. The modes are timm's.
    """

    def __init__(self, probability: float, seed: int, mode: str = "const") -> None:
        self.probability = probability
        self.seed = seed
        self.active = probability > 0
        self.draws_noise = self.active and mode == "pixel"

    def sample(
        self, step: int, global_batch_size: int, image_size: tuple[int, int]
    ) -> dict[str, Tensor]:
        """Return `erase_box` [B, 4] of the whole global batch, a function of (seed, step) alone.

        With noise also `erase_key`, int64 [B] below 2^31. The boxes are the same.
        """
        rng = np.random.Generator(np.random.Philox(key=[self.seed + (_SALT << 32), step]))
        chosen = rng.random(global_batch_size) < self.probability
        boxes = np.zeros((global_batch_size, 4), np.float32)
        for _ in range(_TRIES):
            drawn, fits = _draw_boxes(rng, global_batch_size, image_size)
            empty = boxes[:, 1] == 0
            boxes = np.where((empty & fits & chosen)[:, None], drawn, boxes)
        draws = {ERASE_BOX: torch.from_numpy(boxes.astype(np.float32))}
        if self.draws_noise:
            draws[ERASE_KEY] = torch.from_numpy(rng.integers(0, 2**31, global_batch_size))
        return draws

    def erase_pixels(
        self, pixels: Tensor, draws: Mapping[str, Tensor], mean: Tensor, std: Tensor
    ) -> Tensor:
        """Return images [B, C, H, W] with their rectangles filled.

        `mean` (the pixel that normalises to zero) and `std` (the divisor) are broadcastable to
        them.
        """
        if not self.active:
            return pixels
        inside = compute_inside(draws[ERASE_BOX], pixels.shape[2:])
        fill = mean
        if self.draws_noise:
            key = torch.zeros(1, dtype=torch.int64, device=pixels.device)
            noise = draw_normal(draws[ERASE_KEY], key, pixels[0].numel()).view_as(pixels)
            fill = mean + std * noise
        return torch.where(inside, fill, pixels)


def _draw_boxes(
    rng: np.random.Generator, count: int, image_size: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Try once: return boxes [n, 4] and whether each fits into the image."""
    height, width = image_size
    area = rng.uniform(*_AREA, count) * height * width
    aspect = np.exp(rng.uniform(math.log(_ASPECT[0]), math.log(_ASPECT[1]), count))
    rows, columns = np.round(np.sqrt(area * aspect)), np.round(np.sqrt(area / aspect))
    fits = (rows < height) & (columns < width) & (rows > 0) & (columns > 0)
    top = np.floor(rng.random(count) * (height - rows + 1))
    left = np.floor(rng.random(count) * (width - columns + 1))
    return np.stack([top, top + rows, left, left + columns], axis=1), fits
