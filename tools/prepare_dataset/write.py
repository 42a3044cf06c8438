"""Writes a TFDS dataset file by file, so that an interrupted run continues where it stopped."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from tqdm import tqdm

from big_vision.pp.registry import Example
from utils.errors import UserError
from utils.programs import ProgramParser, require_at_least
from utils.storage.places import is_remote, to_path

if TYPE_CHECKING:
    from tensorflow_datasets.core import SplitInfo
    from tensorflow_datasets.core.features import FeaturesDict

Commands: TypeAlias = "argparse._SubParsersAction[ProgramParser]"
E = TypeVar("E")  # an example before it is encoded
VERSION = "1.0.0"
FORMATS = ("tfrecord", "array_record")
_SHARD_UNIT = 1 << 20


@dataclass(frozen=True)
class Conversion(Generic[E]):
    """Content of a dataset to write."""

    name: str
    description: str
    features: Example  # name -> feature, for tfds.features.FeaturesDict
    # name -> examples; each is turned into features only when it is written
    splits: Mapping[str, Sequence[E]]
    encode: Callable[[E], Example]  # returns the features of an example
    get_bytes: Callable[[E], int]  # returns the approximate size of an example


def add_root_flags(command: argparse.ArgumentParser) -> None:
    """Add the flags of every kind that becomes a TFDS dataset."""
    add, what = command.add_argument, "data root to write below"
    add("--out", "--root", required=True, metavar="DIR", help=what)
    add("--format", choices=FORMATS, help="file format (default tfrecord)")


def add_output_flags(command: argparse.ArgumentParser) -> None:
    """Add the flags of a kind that `write_dataset` writes."""
    add_root_flags(command)
    command.add_argument("--shard-mib", type=int, default=128, help="size of a file (default 128)")


def get_target(arguments: argparse.Namespace) -> Path:
    """Return DIR/NAME/VERSION of the flags."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", arguments.version):
        raise UserError(f"--version ({arguments.version}) is not of the form 1.0.0; write it so")
    require_at_least(1, arguments, "shard_mib")
    return check_target(get_root(arguments.out) / arguments.name / arguments.version, "--out")


def check_name(name: str) -> None:
    """Raise a UserError if a dataset cannot have the name."""
    if not name.isidentifier() or name != name.lower():
        raise UserError(f"--name ({name}) must consist of a-z, 0-9 and _; rename it")


def get_root(path: str, flag: str = "--out") -> Path:
    """Return a flag's directory, which may be missing; a UserError if it is a URL or read-only."""
    if is_remote(path):
        raise UserError(
            f"{flag} ({path!r}) is a URL, but a dataset is written to a local directory; give "
            "one, and copy it afterwards (to a bucket: gcloud storage cp -r)"
        )
    _check_writable(to_path(path), f"{flag} ({path!r}):", "name a directory")
    return to_path(path)


def check_target(target: Path, flag: str) -> Path:
    """Return the directory of a dataset, which is complete or can be created; `flag` named it.

    A UserError if a file or other content is in the way.
    """
    if is_complete(target):
        return target
    for path in (target, _get_partial(target)):
        reason = f"{flag}: the dataset would go to {target}, but"
        _check_writable(path, reason, f"remove it, or give another {flag}")
    if target.is_dir() and any(target.iterdir()):
        raise UserError(
            f"{flag}: {target} is there already, but without the dataset_info.json of a "
            f"complete dataset; remove it, or give another {flag}"
        )
    return target


def read_splits(text: str | None) -> list[str]:
    """Return the names of --splits, empty without the flag; a UserError if one is missing."""
    names = [] if text is None else text.split(",")
    if not all(name.strip() for name in names):
        raise UserError(
            f"--splits ({text!r}) lacks a name; write them as train,test, or leave the flag out"
        )
    return names


def _check_writable(path: Path, reason: str, way_out: str) -> None:
    nearest = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not nearest.is_dir():
        raise UserError(f"{reason} {nearest} is a file; {way_out}")
    try:  # rights do not suffice: file systems such as /proc take no files
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        raise UserError(f"{reason} nothing can be written to {nearest}; {way_out}") from error


def is_complete(target: Path) -> bool:
    """Return whether the dataset exists and is complete."""
    return (target / "dataset_info.json").exists()


def refuse_other_format(target: Path, wanted: str | None, way_out: str) -> None:
    """Raise a UserError if the stored dataset has another format than --format."""
    metadata = json.loads((target / "dataset_info.json").read_text(encoding="utf-8"))
    stored = metadata.get("fileFormat", FORMATS[0])
    if wanted not in (None, stored):
        raise UserError(
            f"--format {wanted}: {target} is there already as {stored}; {way_out}, or remove the "
            "old one"
        )


def write_once(
    create: Callable[[argparse.Namespace], Conversion[E]], arguments: argparse.Namespace
) -> Path:
    """Write the dataset of `create(arguments)`; a UserError if it exists in another --format."""
    target = get_target(arguments)
    if not is_complete(target):
        return write_by_flags(create(arguments), target, arguments)
    refuse_other_format(target, arguments.format, "choose another --out")
    print("is there already; nothing is written", file=sys.stderr)
    return target


def write_by_flags(conversion: Conversion[E], target: Path, arguments: argparse.Namespace) -> Path:
    """Call `write_dataset` with the format and the file size of the flags."""
    file_format = arguments.format or FORMATS[0]
    return write_dataset(conversion, target, file_format, arguments.shard_mib * _SHARD_UNIT)


def write_dataset(
    conversion: Conversion[E], target: Path, file_format: str, shard_bytes: int
) -> Path:
    """Write files one by one beside `target`, then metadata, then move all to `target`."""
    import tensorflow_datasets as tfds

    content = repr((shard_bytes, [(split, list(e)) for split, e in conversion.splits.items()]))
    open_partial(target, content)
    features = tfds.features.FeaturesDict(conversion.features)
    infos = []
    total = sum(len(examples) for examples in conversion.splits.values())
    with tqdm(total=total, desc=f"write {conversion.name}", unit="example", disable=None) as bar:
        for split, examples in conversion.splits.items():
            shards = [
                (len(shard), _serialize(conversion, features, shard))
                for shard in _cut(examples, conversion.get_bytes, shard_bytes)
            ]
            stem = f"{conversion.name}-{split}"
            infos.append(write_split(target, stem, file_format, shards, lambda n, _: bar.update(n)))
    return finish(target, features, infos, conversion.description)


def write_split(
    target: Path,
    stem: str,
    file_format: str,
    shards: Sequence[tuple[int, Iterator[bytes]]],
    report: Callable[[int, int], bool | None],
) -> SplitInfo:
    """Write the unfinished files of a split of `target`; return TFDS's SplitInfo.

    Args:
      stem: DATASET-SPLIT, the begin of the files' names.
      shards: number and records of each file; records of existing files are not computed.
      report: called with the numbers of examples and of bytes of each finished file.
    """
    import tensorflow_datasets as tfds

    partial, num_bytes = _get_partial(target), 0
    dataset, _, split = stem.partition("-")
    for number, (count, records) in enumerate(shards):
        path = partial / f"{stem}.{file_format}-{number:05d}-of-{len(shards):05d}"
        size = write_shard(path, records, file_format)
        num_bytes += size
        report(count, size)
    template = tfds.core.ShardedFileTemplate(
        data_dir=partial, dataset_name=dataset, filetype_suffix=file_format, split=split
    )
    return tfds.core.SplitInfo(
        name=split,
        shard_lengths=[count for count, _ in shards],
        num_bytes=num_bytes,
        filename_template=template,
    )


def finish(target: Path, features: FeaturesDict, infos: list[SplitInfo], description: str) -> Path:
    """Add the metadata to the unfinished files of `target` and rename their directory."""
    import tensorflow_datasets as tfds

    partial, template = _get_partial(target), infos[0].filename_template
    assert template is not None
    for path in partial.iterdir():
        if not path.name.startswith(f"{template.dataset_name}-"):
            path.unlink()
    tfds.folder_dataset.write_metadata(
        data_dir=partial,
        features=features,
        split_infos=infos,
        version=target.name,
        filename_template=template.replace(split=None),
        check_data=False,
        description=description,
    )
    partial.replace(target)
    return target


def open_partial(target: Path, content: str) -> None:
    """Create the directory of unfinished files, emptied unless they are of the same content."""
    partial = _get_partial(target)
    fingerprint = hashlib.sha256(content.encode()).hexdigest()
    note = partial / "fingerprint"
    if partial.exists() and not (note.exists() and note.read_text() == fingerprint):
        shutil.rmtree(partial)
    partial.mkdir(parents=True, exist_ok=True)
    note.write_text(fingerprint)


def _get_partial(target: Path) -> Path:
    return target.with_name(f"{target.name}.incomplete")


def _serialize(
    conversion: Conversion[E], features: FeaturesDict, examples: Sequence[E]
) -> Iterator[bytes]:
    for example in examples:
        yield features.serialize_example(features.encode_example(conversion.encode(example)))


def write_shard(path: Path, records: Iterator[bytes], file_format: str) -> int:
    """Write a file atomically, unless an earlier run has; return its size in bytes."""
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


def _cut(examples: Sequence[E], get_bytes: Callable[[E], int], limit: int) -> Iterator[Sequence[E]]:
    """Cut into consecutive parts of about `limit` bytes, the same in every run."""
    begin, size = 0, 0
    for number, example in enumerate(examples):
        size += get_bytes(example)
        if size >= limit:
            yield examples[begin : number + 1]
            begin, size = number + 1, 0
    if begin < len(examples):
        yield examples[begin:]
