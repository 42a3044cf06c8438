"""The 1,797 handwritten digits of scikit-learn."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from tools.prepare_dataset import write
from utils.errors import UserError

DIGITS_SEED = 0
# Of ten classes: 300 examples each; the remaining 1,197 are for training.
DIGITS_PER_CLASS = {"test": 30, "validation": 30}


def add_command(commands: write.Commands) -> None:
    """Add the subcommand `digits`."""
    digits = commands.add_parser("digits", help="the 1,797 handwritten digits of scikit-learn")
    digits.set_defaults(prepare=prepare_digits, name="digits", version=write.VERSION)
    write.add_output_flags(digits)


def prepare_digits(arguments: argparse.Namespace) -> Path:
    """Write scikit-learn's digits: 8x8 grey PNG, 0..16 scaled to 0..255, splits stratified."""
    return write.write_once(lambda _: describe_digits("digits"), arguments)


def describe_digits(name: str, splits: dict[str, list[int]] | None = None) -> write.Conversion[int]:
    """Return the digits as a dataset; `splits` are positions in scikit-learn's order."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError("digits needs scikit-learn; pip install scikit-learn") from error
    import tensorflow_datasets as tfds

    bunch: Any = load_digits()
    images = np.round(bunch.images * (255 / 16)).astype(np.uint8)[..., None]
    return write.Conversion(
        name=name,
        description="The 1,797 handwritten digits that ship with scikit-learn, 8x8 grey.",
        features={
            "image": tfds.features.Image(shape=(8, 8, 1), encoding_format="png"),
            "label": tfds.features.ClassLabel(names=[str(digit) for digit in range(10)]),
            "id": tfds.features.Scalar(dtype=np.int64),
        },
        splits=split_digits(bunch.target) if splits is None else splits,
        encode=lambda i: {"image": images[i], "label": int(bunch.target[i]), "id": int(i)},
        get_bytes=lambda _: 200,
    )


def split_digits(labels: np.ndarray) -> dict[str, list[int]]:
    """Return positions in scikit-learn's order, fixed and stratified, for labels [N]."""
    rng = np.random.RandomState(DIGITS_SEED)
    splits: dict[str, list[int]] = {"train": [], "validation": [], "test": []}
    for label in range(10):
        order = rng.permutation(np.flatnonzero(labels == label))
        begin = 0
        for split, count in DIGITS_PER_CLASS.items():
            splits[split] += order[begin : begin + count].tolist()
            begin += count
        splits["train"] += order[begin:].tolist()
    return {split: rng.permutation(indices).tolist() for split, indices in splits.items()}
