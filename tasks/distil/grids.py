"""Brings a student's patches onto the grid of a teacher's, by products with static matrices."""

from __future__ import annotations

from torch import Tensor, nn

from models.transforms import create_resampler, resample

# Rows and columns of an image's patches.
Grid = tuple[int, int]


class GridChange(nn.Module):
    """Patches [B, N, C] of one grid -> those of another, bilinear with antialiasing.

    torch's operator for it has no lowering to XLA and would run on the host.
    """

    def __init__(self, grid: Grid, target: Grid) -> None:
        super().__init__()
        self.grid, self.is_needed = grid, grid != target
        for axis, (size, wanted) in enumerate(zip(grid, target, strict=True)):
            self.register_buffer(f"axis{axis}", create_resampler(size, wanted), persistent=False)

    def forward(self, patches: Tensor) -> Tensor:
        """[B, M, C], float32 where the grids differ."""
        if not self.is_needed:
            return patches
        maps = patches.float().transpose(1, 2).unflatten(2, self.grid)
        return resample(maps, self.axis0, self.axis1).flatten(2).transpose(1, 2)
