"""Real pictures for programs that were given none: scikit-learn's two sample photographs."""

from __future__ import annotations

from pathlib import Path

_SIDE = 240  # of a piece; the photographs have 427 x 640 pixels


def write_samples(folder: Path, count: int) -> None:
    """Write so many pieces of the photographs, half of them mirrored, as PNG files."""
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
