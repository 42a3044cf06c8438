"""Rectangles of an image as data: rows y0, y1 and columns x0, x1 of each example."""

from __future__ import annotations

import torch
from torch import Tensor


def compute_inside(boxes: Tensor, image_size: tuple[int, int]) -> Tensor:
    """bool [B, 1, H, W]: which pixels lie in each example's box; one graph for all boxes.

    Args:
      boxes: float [B, 4], y0 <= row < y1 and x0 <= column < x1; an empty box holds no pixel.
    """
    height, width = image_size
    rows = torch.arange(height, device=boxes.device, dtype=torch.float32).view(1, -1, 1)
    columns = torch.arange(width, device=boxes.device, dtype=torch.float32).view(1, 1, -1)
    box = boxes.view(-1, 4, 1, 1)
    inside = (rows >= box[:, 0]) & (rows < box[:, 1])
    return (inside & (columns >= box[:, 2]) & (columns < box[:, 3])).unsqueeze(1)
