"""Input images: those of a folder, or pieces of scikit-learn's two photographs."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor

from datasets import ImageBatch
from models.trained import TrainedModel
from models.transforms import to_pixels
from tools.weights.load_model import open_images
from utils.errors import UserError

_READ_AT_ONCE = 16
_SIDE = 240  # of a piece; the photographs have 427 x 640 pixels


def read_images(trained: TrainedModel, path: str, count: int, *, normalize: bool) -> Tensor:
    """Read at most `count` images of a folder, or pieces of two photographs if `path` is empty.

    Raises:
      UserError: there is no image.
    """
    with tempfile.TemporaryDirectory() as folder:
        if not path:
            write_samples(Path(folder), count)
        loader = open_images(path or folder, "--images", trained.pp, _READ_AT_ONCE)
        parts: list[Tensor] = []
        for batch in loader.batches():
            assert isinstance(batch, ImageBatch)
            parts.append(to_pixels(batch.images[batch.indices >= 0]))
            if sum(map(len, parts)) >= count:
                break
        loader.close()
    pixels = torch.cat(parts)[:count]
    if not len(pixels):
        raise UserError(f"--images ({path!r}) holds no image that can be read; name another")
    return pixels if normalize else trained.create_transform()(pixels)


def write_samples(folder: Path, count: int) -> None:
    """Write `count` pieces of the photographs, half of them mirrored, as PNG files."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    photographs = load_sample_images().images
    for number in range(count):
        image = photographs[number % len(photographs)]
        rows, columns = image.shape[0] - _SIDE, image.shape[1] - _SIDE
        top, left = 61 * number % rows, 97 * number % columns
        piece = image[top : top + _SIDE, left : left + _SIDE]
        piece = piece[:, ::-1] if number // len(photographs) % 2 else piece
        Image.fromarray(piece).save(folder / f"sample_{number:03d}.png")
