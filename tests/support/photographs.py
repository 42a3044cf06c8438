"""Real photographs from installed packages, as files."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def write_photographs(folder: Path, count: int = 4, side: int = 160) -> list[Path]:
    """Pieces of scikit-learn's two sample photographs, as PNG files."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in range(count):
        image = load_sample_images().images[number % 2]
        row, column = 30 * number % (image.shape[0] - side), 50 * number % (image.shape[1] - side)
        path = folder / f"photograph_{number}.png"
        Image.fromarray(image[row : row + side, column : column + side]).save(path)
        paths.append(path)
    return paths


def write_digits(folder: Path, count: int = 12) -> np.ndarray:
    """The first handwritten digits of scikit-learn as grey PNG files; gives [n, 8, 8] uint8."""
    from PIL import Image
    from sklearn.datasets import load_digits

    folder.mkdir(parents=True, exist_ok=True)
    digits = np.clip(load_digits().images[:count] * 16, 0, 255).astype(np.uint8)
    for number, digit in enumerate(digits):
        Image.fromarray(digit).save(folder / f"digit_{number:02d}.png")
    return digits
