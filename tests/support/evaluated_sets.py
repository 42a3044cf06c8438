"""Small sets in the forms of ImageNet's relatives in TFDS, made of handwritten digits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

NAMES = tuple(str(digit) for digit in range(10))
_VERSION = "1.0.0"


@dataclass(frozen=True)
class Examples:
    """What a set holds, to hold results against.

    Attributes:
      images: [N, 8, 8, 1] uint8.
      labels: [N] int, or a list of right ones for each.
    """

    images: np.ndarray
    labels: Sequence[int] | Sequence[Sequence[int]]


def load_examples(count: int, seed: int, digits: Sequence[int] = range(10)) -> Examples:
    """Some of scikit-learn's digits; of any split, for sets need not be unseen here."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    order = np.random.RandomState(seed).permutation(np.flatnonzero(np.isin(bunch.target, digits)))
    images = np.round(bunch.images * (255 / 16)).astype(np.uint8)[..., None]
    return Examples(images[order[:count]], bunch.target[order[:count]].tolist())


def shift(examples: Examples, severity: int, seed: int = 0) -> Examples:
    """The same examples with noise on their pixels."""
    noise = np.random.RandomState(seed).normal(0, 20 * severity, examples.images.shape)
    images = np.clip(examples.images + noise, 0, 255).astype(np.uint8)
    return Examples(images, examples.labels)


def write_set(
    root: Path, name: str, split: str, examples: Examples, *, names: Sequence[str] = NAMES
) -> None:
    """Write a TFDS dataset with the features of `imagenet_v2` and its like.

    One with lists of labels has those of `imagenet2012_real`.

    Args:
      name: with its config: `imagenet_v2/matched-frequency`.
    """
    import tensorflow_datasets as tfds

    from tools.prepare_dataset.write import Conversion, write_dataset

    label = tfds.features.ClassLabel(names=list(names))
    features = {
        # Without loss, so that results can be held against the images themselves.
        "image": tfds.features.Image(shape=(None, None, 1), encoding_format="png"),
        "file_name": tfds.features.Text(),
    }
    is_real = bool(examples.labels) and isinstance(examples.labels[0], list)
    if is_real:
        features |= {"original_label": label, "real_label": tfds.features.Sequence(label)}
    else:
        features["label"] = label

    def encode(number: int) -> dict[str, object]:
        one = {"image": examples.images[number], "file_name": f"{number:08d}.png"}
        right = examples.labels[number]
        if is_real:
            return one | {"real_label": right, "original_label": right[0] if right else 0}
        return one | {"label": right}

    conversion = Conversion(
        name=name.partition("/")[0],
        description="Handwritten digits.",
        features=features,
        splits={split: list(range(len(examples.labels)))},
        encode=encode,
        get_bytes=lambda number: 200,
    )
    target = root / name / _VERSION
    target.parent.mkdir(parents=True, exist_ok=True)
    write_dataset(conversion, target, "tfrecord", 1 << 20)
