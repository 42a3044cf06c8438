"""What a model sees of a batch: `View` turns raw pixels into its normalised input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


class View(nn.Module):
    """Raw pixels [B, C, H, W] of 0..255 as a model's input, on the device.

    Args:
      mean: per channel, on the scale of the pixels.
      std: per channel, on the scale of the pixels.
      size: side to resize to (bilinear, antialiased); none: as they come.
    """

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], size: int | None = None
    ) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1), persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """Float32 [B, C, size, size], (pixels - mean) / std."""
        if self.size is not None and pixels.shape[-1] != self.size:
            pixels = functional.interpolate(
                pixels, size=(self.size, self.size), mode="bilinear", antialias=True
            )
        return (pixels - self.mean) / self.std


def create_view(mean: Sequence[float], std: Sequence[float], channels: int) -> View:
    """A view with one mean and std for each channel; a single value serves all."""
    return View(spread_channels(mean, channels), spread_channels(std, channels))


def to_pixels(images: Tensor) -> Tensor:
    """uint8 [B, H, W, C] as it travels -> float32 [B, C, H, W] as models want it."""
    return images.permute(0, 3, 1, 2).to(torch.float32)


def spread_channels(values: Sequence[float], channels: int) -> list[float]:
    """One number for each channel; a single one serves all."""
    values = [float(v) for v in values]
    return values * channels if len(values) == 1 else values
