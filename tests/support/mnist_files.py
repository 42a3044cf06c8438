"""MNIST's four files, filled with scikit-learn's digits."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np

TRAIN, TEST = 200, 60
# Gzipped or not and with a dot or a dash, as people have them.
NAMES = {
    "train-images": "train-images-idx3-ubyte",
    "train-labels": "train-labels.idx1-ubyte",
    "t10k-images": "t10k-images-idx3-ubyte.gz",
    "t10k-labels": "t10k-labels-idx1-ubyte.gz",
}


def encode_idx(array: np.ndarray) -> bytes:
    """An array of uint8 as an idx file."""
    return struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """The digits, each pixel repeated to 24 x 24, in a frame of 28 x 28; and their labels."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.round(bunch.images * (255 / 16)).astype(np.uint8)
    large = images.repeat(3, axis=1).repeat(3, axis=2)
    return np.pad(large, ((0, 0), (2, 2), (2, 2))), bunch.target.astype(np.uint8)


def write_mnist(folder: Path) -> Path:
    """The four files."""
    images, labels = read_digits()
    parts = {"train": slice(TRAIN), "t10k": slice(TRAIN, TRAIN + TEST)}
    folder.mkdir()
    for name, file in NAMES.items():
        split, _, kind = name.partition("-")
        data = encode_idx((images if kind == "images" else labels)[parts[split]])
        (folder / file).write_bytes(gzip.compress(data) if file.endswith(".gz") else data)
    return folder
