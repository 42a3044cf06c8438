"""Maps raw pixels of a batch to the normalised input of a model, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


class InputTransform(nn.Module):
    """Raw pixels [B, C, H, W] of 0..255 as a model's input.

    Args:
      mean, std: per channel, on the scale of the pixels.
      size: side to resize to (bilinear, antialiased); None keeps sizes.

    The resize is two matrix products with torch's own resampling weights: its operator for it has
    no lowering to XLA and would run on the host.
    """

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], size: int | None = None
    ) -> None:
        super().__init__()
        self.size = size
        self._resamplers: dict[tuple[int, torch.device], Tensor] = {}
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1), persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """Float32 [B, C, size, size], (pixels - mean) / std."""
        if self.size is not None and pixels.shape[-2:] != (self.size, self.size):
            rows, columns = (self._get_resampler(side, pixels.device) for side in pixels.shape[-2:])
            pixels = resample(pixels, rows, columns)
        return (pixels - self.mean) / self.std

    def expect(self, height: int, width: int, device: torch.device) -> None:
        """Create the weights for pixels of a size; created in a step, they would trace it twice."""
        if self.size is not None and (height, width) != (self.size, self.size):
            for side in (height, width):
                self._get_resampler(side, device)

    def _get_resampler(self, side: int, device: torch.device) -> Tensor:
        """[size, side] weights that resample one axis, created once for each side and device."""
        key = (side, device)
        if key not in self._resamplers:
            assert self.size is not None
            self._resamplers[key] = create_resampler(side, self.size).to(device)
        return self._resamplers[key]


def create_resampler(side: int, size: int, mode: str = "bilinear") -> Tensor:
    """[size, side] float32 on the host: torch's own weights with antialiasing."""
    unit = torch.eye(side, device="cpu").view(1, 1, side, side)
    weights = functional.interpolate(unit, size=(size, side), mode=mode, antialias=True)
    return weights[0, 0]


def resample(pixels: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Pixels [..., H, W] of another size, by two products with `create_resampler`'s weights."""
    with torch.autocast(pixels.device.type, enabled=False):
        return rows @ pixels @ columns.transpose(0, 1)


def create_input_transform(
    mean: Sequence[float], std: Sequence[float], channels: int
) -> InputTransform:
    """Create a transform; a single mean or std serves all channels."""
    return InputTransform(spread_channels(mean, channels), spread_channels(std, channels))


def to_pixels(images: Tensor) -> Tensor:
    """Convert uint8 [B, H, W, C] to float32 [B, C, H, W]."""
    return images.permute(0, 3, 1, 2).to(torch.float32)


def spread_channels(values: Sequence[float], channels: int) -> list[float]:
    """Return one number for each channel; a single one serves all."""
    values = [float(v) for v in values]
    return values * channels if len(values) == 1 else values
