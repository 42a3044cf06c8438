"""Small real datasets and configurations for the tests of the input pipeline."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from datasets import Loader, Role, create_loader
from utils.config.data import DataSection

RECORDS = {"train": 203, "validation": 45}
RECORD_CLASSES = 7


def create_section(root: Path | str, **data: object) -> DataSection:
    """The section that a loader reads; by default the dataset of `write_records`."""
    values: dict[str, object] = {
        "name": "records",
        "root": str(root),
        "train_pp": "decode|resize(6)|value_range(-1, 1)",
        "eval_pp": "decode|resize(6)|value_range(-1, 1)",
        "global_batch_size": 16,
        "threads": 2,
    }
    return DataSection(**(values | data))


def open_loader(data: DataSection, role: Role = "train", **arguments: Any) -> Loader:
    """A loader of the seed 0, if nothing else is said."""
    return create_loader(data, role, **{"seed": 0, **arguments})


def get_image(index: int) -> np.ndarray:
    """The [6, 6, 3] uint8 image of a record: its number, and a gradient that flips show."""
    image = np.zeros((6, 6, 3), np.uint8)
    image[..., 0] = index
    image[..., 1] = np.arange(6) * 10
    return image


def write_records(root: Path, file_format: str = "tfrecord", broken: tuple[int, ...] = ()) -> Path:
    """Write the TFDS dataset `records`: several files of unequal length, `id` = record number.

    Args:
      broken: ids of training examples whose image is no image, in records that are intact.
    """
    import tensorflow as tf
    import tensorflow_datasets as tfds

    from tools.prepare_dataset.write import Conversion, write_dataset

    def encode(key: tuple[str, int]) -> dict[str, object]:
        split, number = key
        image = tf.io.encode_png(get_image(number)).numpy()
        if split == "train" and number in broken:
            image = b"no image at all"
        return {"image": image, "label": number % RECORD_CLASSES, "id": number}

    conversion = Conversion(
        name="records",
        description="Numbered images.",
        features={
            "image": tfds.features.Image(shape=(6, 6, 3), encoding_format="png"),
            "label": tfds.features.ClassLabel(num_classes=RECORD_CLASSES),
            "id": tfds.features.Scalar(dtype=np.int64),
        },
        splits={
            split: [(split, number) for number in range(count)] for split, count in RECORDS.items()
        },
        encode=encode,
        get_bytes=lambda key: 1 + key[1] % 3,
    )
    return write_dataset(conversion, root / "records" / "1.0.0", file_format, 60)


def use_private_cache(directory: Path) -> None:
    """Keep indexes of test data out of the user's cache."""
    os.environ["XDG_CACHE_HOME"] = str(directory)
