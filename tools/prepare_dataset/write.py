"""Writes a TFDS dataset file by file, so that a broken-off run goes on where it stopped."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from utils.errors import UserError
from utils.programs import require_at_least
from utils.storage.places import is_remote, to_path

VERSION = "1.0.0"
FORMATS = ("tfrecord", "array_record")
_SHARD_UNIT = 1 << 20


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


def add_place_flags(command: argparse.ArgumentParser) -> None:
    """The flags of every kind that becomes a TFDS dataset."""
    add, what = command.add_argument, "data root to write below"
    add("--out", "--root", required=True, metavar="DIR", help=what)
    add("--format", choices=FORMATS, help="file format (default tfrecord)")


def add_output_flags(command: argparse.ArgumentParser) -> None:
    """Those of a kind that is written here."""
    add_place_flags(command)
    command.add_argument("--shard-mib", type=int, default=128, help="size of a file (default 128)")


def get_target(arguments: argparse.Namespace) -> Path:
    """DIR/NAME/VERSION of the flags."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", arguments.version):
        raise UserError(f"--version ({arguments.version}) is not of the form 1.0.0; write it so")
    require_at_least(1, arguments, "shard_mib")
    return check_target(get_root(arguments.out) / arguments.name / arguments.version, "--out")


def check_name(name: str) -> None:
    """Raises UserError where a dataset cannot be called so."""
    if not name.isidentifier() or name != name.lower():
        raise UserError(f"--name ({name}) must consist of a-z, 0-9 and _; rename it")


def get_root(place: str, flag: str = "--out") -> Path:
    """The directory that a flag names, which need not be there yet.

    Raises:
      UserError: it is a URL, whose datasets are written elsewhere and copied, or no directory can
        be made there.
    """
    if is_remote(place):
        raise UserError(
            f"{flag} ({place!r}) is a URL, but a dataset is written to a local directory; give "
            "one, and copy it afterwards (to a bucket: gcloud storage cp -r)"
        )
    root = to_path(place)
    _check_place(root, f"{flag} ({place!r}):", "name a directory")
    return root


def check_target(target: Path, flag: str) -> Path:
    """The directory of a dataset, where a whole one is or one can be made.

    Args:
      flag: says where the dataset goes.

    Raises:
      UserError: a file stands there or on the way, or other things that would be in the way.
    """
    if is_complete(target):
        return target
    told = f"{flag}: the dataset would go to {target}, but"
    for place in (target, _get_partial(target)):
        _check_place(place, told, f"remove it, or give another {flag}")
    if target.is_dir() and any(target.iterdir()):
        raise UserError(
            f"{flag}: {target} is there already, but without the dataset_info.json of a whole "
            f"dataset; remove it, or give another {flag}"
        )
    return target


def read_splits(asked: str | None) -> list[str]:
    """The names of --splits; none: the flag was not given.

    Raises:
      UserError: a name is missing.
    """
    if asked is None:
        return []
    names = asked.split(",")
    if not all(name.strip() for name in names):
        raise UserError(
            f"--splits ({asked!r}) lacks a name; write them as train,test, or leave the flag out"
        )
    return names


def _check_place(place: Path, told: str, way_out: str) -> None:
    nearest = next(one for one in (place, *place.absolute().parents) if one.exists())
    if not nearest.is_dir():
        raise UserError(f"{told} {nearest} is a file; {way_out}")
    try:  # rights alone do not tell: the system's own folders take no file from anybody
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        raise UserError(f"{told} nothing can be written to {nearest}; {way_out}") from error


def is_complete(target: Path) -> bool:
    """Whether the dataset is there, whole."""
    return (target / "dataset_info.json").exists()


def is_there(target: Path, arguments: argparse.Namespace) -> bool:
    """Whether the dataset is there already, which is said.

    Raises:
      UserError: it is, but in another format than the one that was asked for.
    """
    if not is_complete(target):
        return False
    refuse_other_format(target, arguments.format, "choose another --out")
    print("is there already; nothing is written", file=sys.stderr)
    return True


def refuse_other_format(target: Path, wanted: str | None, way_out: str) -> None:
    """A format that was asked for is given, or refused where files of another one lie.

    Raises:
      UserError: the stored dataset has another format.
    """
    facts = json.loads((target / "dataset_info.json").read_text(encoding="utf-8"))
    stored = facts.get("fileFormat", FORMATS[0])
    if wanted not in (None, stored):
        raise UserError(
            f"--format {wanted}: {target} is there already as {stored}; {way_out}, or remove the "
            "old one"
        )


def write_asked(conversion: Conversion, target: Path, arguments: argparse.Namespace) -> Path:
    """`write_dataset` in the format and the file size of the flags."""
    file_format = arguments.format or FORMATS[0]
    return write_dataset(conversion, target, file_format, arguments.shard_mib * _SHARD_UNIT)


def write_dataset(conversion: Conversion, target: Path, file_format: str, shard_bytes: int) -> Path:
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
            infos.append(
                write_split(
                    target,
                    f"{conversion.name}-{split}",
                    file_format,
                    shards,
                    lambda count, _: bar.update(count),
                )
            )
    return finish(target, features, infos, conversion.description)


def write_split(
    target: Path,
    stem: str,
    file_format: str,
    shards: Sequence[tuple[int, Iterator[bytes]]],
    report: Callable[[int, int], object],
) -> Any:
    """Write the files of a split among the unfinished ones of `target`; TFDS's SplitInfo.

    Args:
      stem: how the files' names begin, DATASET-SPLIT.
      shards: number and records of each file; records are not drawn of a file that is there.
      report: is told the number of examples and of bytes of each file when it is there.
    """
    import tensorflow_datasets as tfds

    partial, num_bytes = _get_partial(target), 0
    dataset, _, split = stem.partition("-")
    for number, (count, records) in enumerate(shards):
        name = f"{stem}.{file_format}-{number:05d}-of-{len(shards):05d}"
        size = write_shard(partial / name, records, file_format)
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


def finish(target: Path, features: Any, infos: list[Any], description: str) -> Path:
    """Add the metadata to the unfinished files of `target` and give their directory its name."""
    import tensorflow_datasets as tfds

    partial, template = _get_partial(target), infos[0].filename_template.replace(split=None)
    for path in partial.iterdir():
        if not path.name.startswith(f"{template.dataset_name}-"):
            path.unlink()
    tfds.folder_dataset.write_metadata(
        data_dir=partial,
        features=features,
        split_infos=infos,
        version=target.name,
        filename_template=template,
        check_data=False,
        description=description,
    )
    partial.replace(target)
    return target


def open_partial(target: Path, content: str) -> None:
    """Make the directory of unfinished work, emptied if it belongs to other content.

    Args:
      content: what the files follow from.
    """
    partial = _get_partial(target)
    fingerprint = hashlib.sha256(content.encode()).hexdigest()
    note = partial / "fingerprint"
    if partial.exists() and not (note.exists() and note.read_text() == fingerprint):
        shutil.rmtree(partial)
    partial.mkdir(parents=True, exist_ok=True)
    note.write_text(fingerprint)


def _get_partial(target: Path) -> Path:
    return target.with_name(f"{target.name}.incomplete")


def _serialize(conversion: Conversion, features: Any, examples: Sequence[Any]) -> Iterator[bytes]:
    for example in examples:
        yield features.serialize_example(features.encode_example(conversion.encode(example)))


def write_shard(path: Path, records: Iterator[bytes], file_format: str) -> int:
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
