"""Writes a TFDS dataset: scikit-learn's digits, or any folder of class folders.

    python -m tools.prepare_dataset digits --out data
    python -m tools.prepare_dataset folder photos --out data --name photos

The result is read by this project, by `tfds.load(name, data_dir=...)` and `builder_from_directory`.
A broken-off run leaves finished files behind; the same command goes on from there. The dataset's
directory appears only when it is complete.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from utils.errors import UserError
from utils.programs import create_program_parser, run_program

if TYPE_CHECKING:
    from big_vision.input.folder import FolderSelection

VERSION = "1.0.0"
DIGITS_SEED = 0
# Of the ten classes, so 300 examples each; the remaining 1,197 are for training.
DIGITS_PER_CLASS = {"test": 30, "validation": 30}
_FORMATS = ("tfrecord", "array_record")
_SHARD_UNIT = 1 << 20
_SHOWN = 5


@dataclass(frozen=True)
class Conversion:
    """What is to be written.

    Attributes:
      features: name -> feature, for tfds.features.FeaturesDict.
      splits: name -> examples; each is turned into features only when it is written.
      encode: makes the features of one example.
      get_bytes: about how large an example is.
    """

    name: str
    description: str
    features: dict[str, Any]
    splits: dict[str, Sequence[Any]]
    encode: Callable[[Any], dict[str, Any]]
    get_bytes: Callable[[Any], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; the exit code."""
    arguments = create_parser().parse_args(argv)
    interrupted = "interrupted; the same command continues"
    return run_program(lambda: print(arguments.prepare(arguments)), interrupted=interrupted)


def create_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = create_program_parser(__doc__, prog="python -m tools.prepare_dataset")
    commands = parser.add_subparsers(required=True, metavar="{digits,folder}")
    digits = commands.add_parser("digits", help="the 1,797 handwritten digits of scikit-learn")
    digits.set_defaults(prepare=prepare_digits, name="digits", version=VERSION)
    folder = commands.add_parser(
        "folder", help="SRC/<class>/<image> or SRC/<split>/<class>/<image>; images are kept as is"
    )
    folder.add_argument("source", metavar="SRC", help="the folder")
    folder.add_argument("--name", required=True, help="name of the dataset: a-z, 0-9 and _")
    folder.add_argument(
        "--splits",
        default="",
        help="comma-separated subfolders that are splits; default: those named train, val, "
        "validation or test; without any, all classes become the split train",
    )
    folder.add_argument(
        "--fewer-classes",
        default="",
        metavar="SPLITS",
        help="comma-separated splits that may lack classes which others have",
    )
    folder.add_argument(
        "--check", action="store_true", help="decode every image first, and name those that fail"
    )
    folder.add_argument("--version", default=VERSION, help="of the dataset (default 1.0.0)")
    folder.set_defaults(prepare=prepare_folder)
    for command in (digits, folder):
        command.add_argument("--out", required=True, metavar="DIR", help="data root to write below")
        command.add_argument("--format", choices=_FORMATS, help="file format (default tfrecord)")
        command.add_argument(
            "--shard-mib", type=int, default=128, help="size of a file (default 128)"
        )
    return parser


def prepare_digits(arguments: argparse.Namespace) -> Path:
    """Write scikit-learn's digits: 8x8 grey PNG, 0..16 scaled to 0..255, splits stratified."""
    target = _get_target(arguments)
    if _is_complete(target):
        _refuse_other_format(target, arguments.format, "choose another --out")
        print("is there already; nothing is written", file=sys.stderr)
        return target
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError("digits needs scikit-learn; pip install scikit-learn") from error
    import tensorflow_datasets as tfds

    bunch = load_digits()
    images = np.round(bunch.images * (255 / 16)).astype(np.uint8)[..., None]
    conversion = Conversion(
        name="digits",
        description="The 1,797 handwritten digits that ship with scikit-learn, 8x8 grey.",
        features={
            "image": tfds.features.Image(shape=(8, 8, 1), encoding_format="png"),
            "label": tfds.features.ClassLabel(names=[str(digit) for digit in range(10)]),
            "id": tfds.features.Scalar(dtype=np.int64),
        },
        splits=split_digits(bunch.target),
        encode=lambda i: {"image": images[i], "label": int(bunch.target[i]), "id": int(i)},
        get_bytes=lambda _: 200,
    )
    return write_dataset(
        conversion, target, _get_format(arguments), arguments.shard_mib * _SHARD_UNIT
    )


def split_digits(labels: np.ndarray) -> dict[str, list[int]]:
    """Positions in scikit-learn's order, by split: fixed, and every class alike in each.

    Args:
      labels: [N] int.
    """
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


def prepare_folder(arguments: argparse.Namespace) -> Path:
    """Write a folder of class folders; files are copied into the records byte by byte."""
    from big_vision.input.folder import select_folder

    if not arguments.name.isidentifier() or arguments.name != arguments.name.lower():
        raise UserError(f"--name ({arguments.name}) must consist of a-z, 0-9 and _; rename it")
    target = _get_target(arguments)
    found = {
        name: select_folder(arguments.source, inner, "SRC")
        for name, inner in _find_splits(arguments).items()
    }
    if _is_complete(target):
        _refuse_other_format(target, arguments.format, "write it beside with --version 1.0.1")
        _compare_with_stored(target, found, arguments.source)
        return target
    class_names = join_classes(found, arguments.fewer_classes.split(","))
    show_summary(found)
    if arguments.check:
        check_images([path for selection in found.values() for path in selection.paths])
    numbers = {name: number for number, name in enumerate(class_names)}
    import tensorflow_datasets as tfds

    conversion = Conversion(
        name=arguments.name,
        description=f"Images of {len(class_names)} classes.",
        features={
            "image": tfds.features.Image(shape=(None, None, 3)),
            "label": tfds.features.ClassLabel(names=list(class_names)),
            "file_name": tfds.features.Text(),
        },
        splits={
            name: [(path, numbers[path.parent.name]) for path in selection.paths]
            for name, selection in found.items()
        },
        encode=lambda example: {
            "image": str(example[0]),
            "label": example[1],
            "file_name": f"{example[0].parent.name}/{example[0].name}",
        },
        get_bytes=lambda example: example[0].stat().st_size,
    )
    return write_dataset(
        conversion, target, _get_format(arguments), arguments.shard_mib * _SHARD_UNIT
    )


def join_classes(found: Mapping[str, FolderSelection], may_lack: Sequence[str]) -> tuple[str, ...]:
    """Names of the classes of all splits together.

    Raises:
      UserError: a split lacks some, and nobody has said that it may.
    """
    names = tuple(sorted({name for one in found.values() for name in one.class_names}))
    for split, selection in found.items():
        missing = sorted(set(names) - set(selection.class_names))
        if missing and split not in may_lack:
            shown = ", ".join(missing[:_SHOWN]) + (", ..." if len(missing) > _SHOWN else "")
            raise UserError(
                f"split {split} has no folder for {len(missing)} of the {len(names)} classes: "
                f"{shown}; add the folders, or allow it by --fewer-classes {split}"
            )
    return names


def show_summary(found: Mapping[str, FolderSelection]) -> None:
    """A line for each split on stderr: classes, images, and what is not taken."""
    for split, selection in found.items():
        filled = len(np.unique(selection.labels))
        words = f"{split}: {len(selection.paths)} images in {len(selection.class_names)} classes"
        if filled < len(selection.class_names):
            words += f", {len(selection.class_names) - filled} of them without an image"
        if selection.left_out:
            words += f"; left out, as no images: {', '.join(selection.left_out)}"
        print(words, file=sys.stderr)


def check_images(paths: Sequence[Path]) -> None:
    """Decode every image.

    Raises:
      UserError: counts those that cannot be decoded; each has a line of its own on stderr.
    """
    from big_vision.input.faults import get_reason
    from big_vision.pp.builder import get_preprocess_fn

    decode = get_preprocess_fn("decode")

    def find_fault(path: Path) -> str:
        try:
            decode({"image": path.read_bytes()})
        except Exception as error:  # TensorFlow's classes
            return f"{path}: {get_reason(error)}"
        return ""

    with ThreadPoolExecutor() as pool:
        bar = tqdm(
            pool.map(find_fault, paths), total=len(paths), desc="check", unit="image", disable=None
        )
        faults = [fault for fault in bar if fault]
    for fault in faults:
        print(fault, file=sys.stderr)
    if faults:
        raise UserError(
            f"{len(faults)} of the {len(paths)} images cannot be decoded; restore or remove them"
        )


def _get_format(arguments: argparse.Namespace) -> str:
    return arguments.format or _FORMATS[0]


def _refuse_other_format(target: Path, wanted: str | None, way_out: str) -> None:
    """A format that was asked for is given, or refused where files of another one lie.

    Raises:
      UserError: the stored dataset has another format.
    """
    facts = json.loads((target / "dataset_info.json").read_text(encoding="utf-8"))
    stored = facts.get("fileFormat", _FORMATS[0])
    if wanted not in (None, stored):
        raise UserError(
            f"--format {wanted}: {target} is there already as {stored}; {way_out}, or remove the "
            "old one"
        )


def _compare_with_stored(target: Path, found: Mapping[str, FolderSelection], source: str) -> None:
    """Say that the dataset is there already; refuse if it is that of other images.

    Raises:
      UserError: the numbers of images differ.
    """
    from big_vision.input.catalog import load_tfds_catalog

    stored = load_tfds_catalog(str(target), "").splits
    sizes = {name: sum(split.lengths) for name, split in stored.items()}
    now = {name: len(selection.paths) for name, selection in found.items()}
    if sizes != now:
        raise UserError(
            f"{target} is there already with {_show_sizes(sizes)}, but {source} has "
            f"{_show_sizes(now)}; write it beside with --version 1.0.1, or remove the old one"
        )
    print(f"is there already, with {_show_sizes(sizes)}; nothing is written", file=sys.stderr)


def _show_sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{count} images in {split}" for split, count in sizes.items())


def write_dataset(conversion: Conversion, target: Path, file_format: str, shard_bytes: int) -> Path:
    """Write files one by one beside `target`, then metadata, then move all to `target`."""
    import tensorflow_datasets as tfds

    partial = target.with_name(f"{target.name}.incomplete")
    _open_partial(partial, conversion, shard_bytes)
    features = tfds.features.FeaturesDict(conversion.features)
    template = tfds.core.ShardedFileTemplate(
        data_dir=partial, dataset_name=conversion.name, filetype_suffix=file_format
    )
    infos = []
    total = sum(len(examples) for examples in conversion.splits.values())
    with tqdm(total=total, desc=f"write {conversion.name}", unit="example", disable=None) as bar:
        for split, examples in conversion.splits.items():
            shards = list(_cut(examples, conversion.get_bytes, shard_bytes))
            num_bytes = 0
            for number, shard in enumerate(shards):
                name = f"{conversion.name}-{split}.{file_format}-{number:05d}-of-{len(shards):05d}"
                records = _serialize(conversion, features, shard)
                num_bytes += _write_shard(partial / name, records, file_format)
                bar.update(len(shard))
            infos.append(
                tfds.core.SplitInfo(
                    name=split,
                    shard_lengths=[len(shard) for shard in shards],
                    num_bytes=num_bytes,
                    filename_template=template.replace(split=split),
                )
            )
    return _finish(conversion, partial, target, infos)


def _finish(conversion: Conversion, partial: Path, target: Path, infos: list[Any]) -> Path:
    """Add the metadata and give the directory its name."""
    import tensorflow_datasets as tfds

    for path in partial.iterdir():
        if not path.name.startswith(f"{conversion.name}-"):
            path.unlink()
    tfds.folder_dataset.write_metadata(
        data_dir=partial,
        features=tfds.features.FeaturesDict(conversion.features),
        split_infos=infos,
        version=target.name,
        filename_template=infos[0].filename_template.replace(split=None),
        check_data=False,
        description=conversion.description,
    )
    partial.replace(target)
    return target


def _open_partial(partial: Path, conversion: Conversion, shard_bytes: int) -> None:
    """The directory of unfinished work; emptied if it belongs to other examples."""
    content = repr((shard_bytes, [(split, list(e)) for split, e in conversion.splits.items()]))
    fingerprint = hashlib.sha256(content.encode()).hexdigest()
    note = partial / "fingerprint"
    if partial.exists() and not (note.exists() and note.read_text() == fingerprint):
        shutil.rmtree(partial)
    partial.mkdir(parents=True, exist_ok=True)
    note.write_text(fingerprint)


def _serialize(conversion: Conversion, features: Any, examples: Sequence[Any]) -> Iterator[bytes]:
    for example in examples:
        yield features.serialize_example(features.encode_example(conversion.encode(example)))


def _write_shard(path: Path, records: Iterator[bytes], file_format: str) -> int:
    """Write one file atomically, unless it is there from an earlier run; its size in bytes."""
    if path.exists():
        return path.stat().st_size
    temporary = path.with_name(f"writing.{os.getpid()}")
    if file_format == "array_record":
        from array_record.python.array_record_module import ArrayRecordWriter

        writer = ArrayRecordWriter(str(temporary), "group_size:1")
    else:
        import tensorflow as tf

        writer = tf.io.TFRecordWriter(str(temporary))
    for record in records:
        writer.write(record)
    writer.close()
    temporary.replace(path)
    return path.stat().st_size


def _cut(examples: Sequence[Any], get_bytes: Callable, limit: int) -> Iterator[Sequence[Any]]:
    """Consecutive parts of about `limit` bytes; where they end is the same in every run."""
    begin, size = 0, 0
    for number, example in enumerate(examples):
        size += get_bytes(example)
        if size >= limit:
            yield examples[begin : number + 1]
            begin, size = number + 1, 0
    if begin < len(examples):
        yield examples[begin:]


def _find_splits(arguments: argparse.Namespace) -> dict[str, str]:
    """TFDS split -> subfolder (or `all`: the folder itself)."""
    base = Path(arguments.source)
    if not base.is_dir():
        raise UserError(f"SRC ({base}) is no folder; name the folder that holds the class folders")
    if arguments.splits:
        return {name: name for name in arguments.splits.split(",")}
    known = {"train": "train", "val": "validation", "validation": "validation", "test": "test"}
    found = {split: name for name, split in known.items() if (base / name).is_dir()}
    return found or {"train": "all"}


def _get_target(arguments: argparse.Namespace) -> Path:
    if not re.fullmatch(r"\d+\.\d+\.\d+", arguments.version):
        raise UserError(f"--version ({arguments.version}) is not of the form 1.0.0; write it so")
    return Path(arguments.out) / arguments.name / arguments.version


def _is_complete(target: Path) -> bool:
    return (target / "dataset_info.json").exists()


if __name__ == "__main__":
    sys.exit(main())
