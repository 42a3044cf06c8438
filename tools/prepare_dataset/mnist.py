"""The four idx files of MNIST, or of another dataset in that format."""

from __future__ import annotations

import argparse
import gzip
import zlib
from pathlib import Path

import numpy as np

from tools.prepare_dataset import write
from utils.errors import UserError

# The version of TFDS, so that a configuration reads either and `tfds.load` finds this one.
MNIST_VERSION = "3.0.1"
SIDE = 28
# Split -> begin of the names of its two files.
_SPLITS = {"train": "train", "test": "t10k"}
# Kind of a file -> the end of its name, its number of axes.
_KINDS = {"images": ("idx3-ubyte", 3), "labels": ("idx1-ubyte", 1)}
_UINT8 = 0x08


def add_command(commands: write.Commands) -> None:
    """Add the subcommand `mnist`."""
    mnist = commands.add_parser("mnist", help="the four idx files of MNIST, gzipped or not")
    add = mnist.add_argument
    add("--from", dest="source", required=True, metavar="DIR", help="folder of the four files")
    add("--name", default="mnist", help="of the dataset (default mnist)")
    mnist.set_defaults(prepare=prepare_mnist, version=MNIST_VERSION)
    write.add_output_flags(mnist)


def prepare_mnist(arguments: argparse.Namespace) -> Path:
    """Write the images as PNG with the splits train and test, as TFDS has them."""
    return write.write_once(describe_mnist, arguments)


def describe_mnist(arguments: argparse.Namespace) -> write.Conversion[tuple[str, int]]:
    """Read the files and return them as a dataset."""
    splits = {split: read_split(Path(arguments.source), split) for split in _SPLITS}
    import tensorflow_datasets as tfds

    return write.Conversion(
        name=arguments.name,
        description="Images of 28 x 28 grey pixels in ten classes, from idx files.",
        features={
            "image": tfds.features.Image(shape=(SIDE, SIDE, 1), encoding_format="png"),
            "label": tfds.features.ClassLabel(num_classes=10),
        },
        splits={
            split: [(split, number) for number in range(len(labels))]
            for split, (_, labels) in splits.items()
        },
        encode=lambda key: {
            "image": splits[key[0]][0][key[1]][..., None],
            "label": int(splits[key[0]][1][key[1]]),
        },
        get_bytes=lambda _: 400,
    )


def read_split(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Read images [N, 28, 28] and labels [N] of a split, uint8; a UserError for faulty files."""
    paths = {kind: _find_file(folder, f"{_SPLITS[split]}-{kind}", kind) for kind in _KINDS}
    images, labels = (read_idx(path, _KINDS[kind][1]) for kind, path in paths.items())
    if images.shape[1:] != (SIDE, SIDE):
        sides = " x ".join(map(str, images.shape[1:]))
        raise UserError(
            f"{paths['images']} holds images of {sides}, not of {SIDE} x {SIDE}; give MNIST's "
            "files, or write others as a folder of images"
        )
    if len(images) != len(labels):
        raise UserError(
            f"{paths['images']} holds {len(images)} images, but {paths['labels']} {len(labels)} "
            "labels; fetch the two again, from one place"
        )
    if labels.size and labels.max() > 9:
        raise UserError(
            f"{paths['labels']} holds the label {labels.max()}, not 0 to 9 alone; give files of "
            "MNIST's form"
        )
    return images, labels


def read_idx(path: Path, axes: int) -> np.ndarray:
    """Read an idx file of uint8; a UserError for another format, or a size unlike the header's.

    Format: two zero bytes, type (8: uint8), number of axes, each axis as big-endian uint32, data.
    """
    data = _read_bytes(path)
    head = 4 + 4 * axes
    if len(data) < head or data[:4] != bytes((0, 0, _UINT8, axes)):
        raise UserError(
            f"{path} begins with {data[:4].hex() or 'nothing'}, not with 0000{_UINT8:02x}{axes:02x}"
            f", so it is not an idx file of uint8 with {axes} ax{'i' if axes == 1 else 'e'}s; give "
            "MNIST's files under their original names"
        )
    shape = np.frombuffer(data, ">u4", axes, offset=4).astype(int)
    wanted = head + int(shape.prod())
    if len(data) != wanted:
        fault = "cut short" if len(data) < wanted else "too long"
        raise UserError(
            f"{path} holds {len(data)} bytes, but its header promises {wanted} "
            f"({' x '.join(map(str, shape))}); it is {fault}: fetch it again"
        )
    if not shape.all():
        raise UserError(f"{path} holds no examples; fetch it again")
    return np.frombuffer(data, np.uint8, offset=head).reshape(shape)


def _find_file(folder: Path, begin: str, kind: str) -> Path:
    """Return the file of images or labels of a split: with a dot or a dash, gzipped or not."""
    end = _KINDS[kind][0]
    names = [f"{begin}{mark}{end}{zipped}" for mark in "-." for zipped in ("", ".gz")]
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        raise UserError(
            f"--from ({str(folder)!r}) contains neither {names[0]} nor {names[0]}.gz; give the "
            "folder of MNIST's four files"
        )
    return path


def _read_bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read: {error}; fetch it again") from error
