"""Small sets of real images in others' formats: tars of WebDataset, Arrow of `datasets`."""

from __future__ import annotations

import functools
import io
import json
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Picture(NamedTuple):
    """One encoded image."""

    name: str
    image: bytes
    label: int


def encode(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    """Pixels [H, W] or [H, W, 3] as a file's bytes."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


@functools.cache
def get_digits(start: int, count: int) -> tuple[Picture, ...]:
    """Some of scikit-learn's handwritten digits, as 8 x 8 grey PNG."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    pixels = np.round(bunch.images * (255 / 16)).astype(np.uint8)
    return tuple(
        Picture(f"{i:04d}", encode(pixels[i]), int(bunch.target[i]))
        for i in range(start, start + count)
    )


@functools.cache
def get_photographs() -> tuple[Picture, ...]:
    """The photographs that scikit-learn and matplotlib bring along, as the files that they are."""
    import matplotlib
    import sklearn

    samples = Path(sklearn.__file__).parent / "datasets" / "images"
    paths = [samples / "china.jpg", samples / "flower.jpg"]
    paths.append(Path(matplotlib.__file__).parent / "mpl-data/sample_data/grace_hopper.jpg")
    return tuple(Picture(p.stem, p.read_bytes(), n) for n, p in enumerate(paths))


def write_tar(path: Path, files: Iterable[tuple[str, bytes]]) -> Path:
    """A tar of files in the order in which they are given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def write_examples(path: Path, pictures: Sequence[Picture], ending: str = "png") -> Path:
    """A shard of the WebDataset layout, labels in .cls."""
    files = [
        pair
        for one in pictures
        for pair in ((f"{one.name}.cls", b"%d" % one.label), (f"{one.name}.{ending}", one.image))
    ]
    return write_tar(path, files)


def write_digit_tars(root: Path) -> Path:
    """`train` of 120 digits in three shards of unequal length, `val` of 40 in one."""
    digits = get_digits(0, 120)
    for number, (start, stop) in enumerate([(0, 50), (50, 90), (90, 120)]):
        write_examples(root / f"train-{number:03d}.tar", digits[start:stop])
    write_examples(root / "val" / "0.tar", get_digits(200, 40))
    (root / "classnames.txt").write_text("".join(f"{digit}\n" for digit in range(10)))
    return root


def write_arrow(
    folder: Path, shards: Sequence[Sequence[Picture]], names: Sequence[str] | None = None
) -> Path:
    """One split as `save_to_disk` writes it: tables of record batches of 16 rows.

    Args:
      names: of the classes; none: labels are numbers without names.
    """
    import pyarrow as pa

    folder.mkdir(parents=True, exist_ok=True)
    label = {"dtype": "int64", "_type": "Value"}
    if names is not None:
        label = {"names": list(names), "_type": "ClassLabel"}
    features = {"image": {"_type": "Image"}, "label": label}
    image = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    noted = {"huggingface": json.dumps({"info": {"features": features}})}
    schema = pa.schema({"image": image, "label": pa.int64()}, metadata=noted)
    files = [f"data-{n:05d}-of-{len(shards):05d}.arrow" for n in range(len(shards))]
    for file, pictures in zip(files, shards, strict=True):
        rows = {
            "image": [{"bytes": one.image, "path": None} for one in pictures],
            "label": [one.label for one in pictures],
        }
        with pa.ipc.new_stream(str(folder / file), schema) as stream:
            stream.write_table(pa.table(rows, schema), max_chunksize=16)
    state = {"_data_files": [{"filename": file} for file in files], "_split": folder.name}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    return folder


def write_digit_arrow(root: Path) -> Path:
    """The examples of `write_digit_tars` in their order, in other files."""
    digits, names = get_digits(0, 120), [str(digit) for digit in range(10)]
    write_arrow(root / "train", [digits[:70], digits[70:]], names)
    write_arrow(root / "val", [get_digits(200, 40)], names)
    (root / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "val"]}))
    return root
