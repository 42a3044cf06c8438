"""Reads the metadata of a dataset on disk, without TensorFlow."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TypeVar

import numpy as np

from big_vision.input.index_cache import scan_records
from big_vision.input.selection import ImageSelection
from big_vision.input.splits import parse_split
from utils.errors import UserError, get_hint
from utils.json_types import JsonObject
from utils.storage.folder import StorageError
from utils.storage.places import is_remote, open_folder, to_path
from utils.storage.reading import check_readable

ROOT_FLAGS = "--data.root, --data_path or --tfds_data_dir"
_VERSION = re.compile(r"^\d+\.\d+\.\d+$")
_NAME = re.compile(r"^(?P<name>\w+)(/(?P<config>[\w.+-]+))?(:(?P<version>[\d.*]+))?$")
_DEFAULT_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"

P = TypeVar("P")


@dataclass(frozen=True)
class Segment:
    """A run of consecutive records of one file."""

    path: str
    first: int
    count: int


@dataclass(frozen=True, kw_only=True)
class RecordSelection(ImageSelection):
    """The records that a split expression selects; example i is the i-th in this order."""

    directory: str
    file_format: str
    segments: tuple[Segment, ...]
    mean_record_bytes: float

    @property
    def starts(self) -> np.ndarray:
        """[S] int64: index of each segment's first example."""
        counts = np.array([s.count for s in self.segments], np.int64)
        return np.cumsum(counts) - counts

    @property
    def files_hash(self) -> str:
        lines = (f"{PurePath(s.path).name} {s.first} {s.count}" for s in self.segments)
        return hash_files(lines, self.mean_record_bytes)

    def count_common(self, other: RecordSelection) -> int:
        """Count the records of the same files."""
        by_path = defaultdict(list)
        for segment in self.segments:
            by_path[segment.path].append(segment)
        pairs = ((a, b) for b in other.segments for a in by_path[b.path])
        ends = ((min(a.first + a.count, b.first + b.count), a, b) for a, b in pairs)
        return sum(max(0, end - max(a.first, b.first)) for end, a, b in ends)


def hash_files(lines: Iterable[str], mean_record_bytes: float) -> str:
    """Return 16 hex digits that identify the files below a root."""
    text = "\n".join([f"{mean_record_bytes:.6f}", *lines])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class StoredSplit:
    """One split as it lies on disk."""

    paths: tuple[str, ...]
    lengths: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True)
class TfdsCatalog:
    """A prepared TFDS dataset: directory, file format and splits."""

    directory: str
    file_format: str
    splits: dict[str, StoredSplit]
    features: JsonObject

    def select(self, expression: str, label_key: str, key: str) -> RecordSelection:
        """Select the records of a split expression, all of whose files must exist."""
        lengths = {name: split.lengths for name, split in self.splits.items()}
        segments: list[Segment] = []
        num_bytes = 0.0
        ranges = parse_split(expression, lengths, key)
        for part in ranges:
            split = self.splits[part.name]
            pieces = cut_files(split.paths, split.lengths, part.start, part.stop)
            part_segments = [Segment(path, first, last - first) for path, first, last in pieces]
            segments += part_segments
            share = sum(s.count for s in part_segments) / max(1, sum(split.lengths))
            num_bytes += split.num_bytes * share
        names = set(list_directory(self.directory))
        for path in dict.fromkeys(s.path for s in segments):
            if PurePath(path).name not in names:
                raise _create_incomplete_error(self.directory, f"{path} is missing")
        self._check_sizes(dict.fromkeys(part.name for part in ranges))
        num_classes, class_names, several_labels = self._get_classes(label_key)
        return RecordSelection(
            num_examples=sum(s.count for s in segments),
            version=PurePath(self.directory).name,
            num_classes=num_classes,
            class_names=class_names,
            several_labels=several_labels,
            directory=self.directory,
            file_format=self.file_format,
            segments=tuple(segments),
            mean_record_bytes=num_bytes / sum(s.count for s in segments),
        )

    def _check_sizes(self, names: Iterable[str]) -> None:
        """Raise a UserError naming a truncated TFRecord file, if a split is too small on disk.

        The metadata counts the bytes of the records, which is less than the files have. Sizes cost
        nothing on a local disk; on an object store the run finds out when it starts.
        """
        if self.file_format != "tfrecord" or is_remote(self.directory):
            return
        for split in map(self.splits.__getitem__, names):
            if not all(map(os.path.isfile, split.paths)):
                continue
            held = sum(map(os.path.getsize, split.paths))
            for path in split.paths if held < split.num_bytes else ():
                scan_records(path)  # raises if it ends within a record

    def get_image_sides(self, image_key: str) -> tuple[int | None, ...] | None:
        """Return (H, W, C) of encoded images, None for a varying side; None if they are no files.

        Raises:
          UserError: unknown feature.
        """
        image = self._find_feature(image_key, "data.image_key").get("image")
        if image is None:
            return None
        sides = [int(side) for side in image.get("shape", {}).get("dimensions", [])]
        # -1 is a side that varies; no sides at all are an image of any shape.
        return tuple(side if side > 0 else None for side in sides) or (None, None, None)

    def _get_classes(self, label_key: str) -> tuple[int | None, tuple[str, ...] | None, bool]:
        """Return the number of classes, their names, and whether an example has several labels."""
        if not label_key:
            return 1, None, False
        feature = self._find_feature(label_key, "data.label_key")
        inner = feature.get("sequence", {}).get("feature")
        label = (inner or feature).get("classLabel")
        if label is None:
            return None, None, inner is not None
        text = _read_text(self.directory, f"{label_key.replace('/', '-')}.labels.txt")
        names = None if text is None else tuple(line for line in text.splitlines() if line)
        return int(label["numClasses"]), names, inner is not None

    def _find_feature(self, name: str, key: str) -> JsonObject:
        """Return a feature's metadata; `a/b` is feature b of the group a."""
        known = dict(_flatten(self.features))
        if name in known:
            return known[name]
        inside = sorted(other for other in known if other.startswith(f"{name}/"))
        if inside:
            raise UserError(
                f"{key} ({name}) is a group of features; name one of {', '.join(inside)}"
            )
        raise UserError(f"{key} ({name}): the dataset has no such feature; {get_hint(name, known)}")


def _flatten(features: JsonObject, group: str = "") -> Iterator[tuple[str, JsonObject]]:
    for name, feature in features.items():
        inner = feature.get("featuresDict", {}).get("features")
        if inner:
            yield from _flatten(inner, f"{group}{name}/")
        else:
            yield f"{group}{name}", feature


def load_tfds_catalog(root: str, name: str) -> TfdsCatalog:
    """Find `name`, `name/config` or `name:version` below `root` and read its metadata.

    Without a version, take the highest one. `root` may also be the version's directory itself.

    Raises:
      UserError: something is missing, broken or unreadable.
    """
    path_or_url = open_root(root)
    try:
        return _load_catalog(path_or_url, name)
    except StorageError as error:
        raise UserError(f"data.root: {error}; check the network and try again") from error


def _load_catalog(root: str, name: str) -> TfdsCatalog:
    directory = _find_version(root, name)
    info = _read_json(directory, "dataset_info.json")
    features = _read_json(directory, "features.json")
    file_format = info.get("fileFormat", "tfrecord")
    splits = {}
    for split in info.get("splits", []):
        lengths = tuple(int(n) for n in split.get("shardLengths", []))
        template = split.get("filepathTemplate") or _DEFAULT_TEMPLATE
        paths = tuple(
            join_path(directory, _fill(template, info["name"], split["name"], file_format, i, n))
            for n in [len(lengths)]
            for i in range(n)
        )
        splits[split["name"]] = StoredSplit(paths, lengths, int(split.get("numBytes", 0)))
    if not splits:
        raise _create_incomplete_error(directory, "its dataset_info.json lists no split")
    features = features.get("featuresDict", {}).get("features", {})
    return TfdsCatalog(directory, file_format, splits, features)


def join_path(*parts: str) -> str:
    """Join parts of a local path or object-store URL with single slashes."""
    return "/".join([parts[0].rstrip("/"), *(p.strip("/") for p in parts[1:])])


def list_directory(path: str) -> list[str]:
    """Return sorted names in a directory; empty if it does not exist."""
    return open_folder(path).list_names()


def open_root(root: str) -> str:
    """Return data.root without `~` and `$HOME`, or as it is if it is a URL.

    Raises:
      UserError: it is empty, does not exist, or its store does not respond.
    """
    if not root:
        raise UserError(f"data.root is empty; name the directory of the data with {ROOT_FLAGS}")
    try:
        check_readable(root, "data.root")
    except UserError as error:
        hint = f"; set it with {ROOT_FLAGS}" if "does not exist" in str(error) else ""
        raise UserError(f"{error}{hint}") from error.__cause__
    return root.rstrip("/") if is_remote(root) else str(to_path(root))


def open_local_root(root: str, reading: str, way_out: str) -> Path:
    """Return data.root as a local directory; errors as in `open_root`, and for a URL.

    Args:
      reading: why it must be local, for the error, as `tars are read at offsets`.
    """
    if is_remote(root):
        raise UserError(
            f"data.root ({root}) is a URL, but {reading} in local folders only; {way_out}"
        )
    return to_path(open_root(root))


def _create_incomplete_error(directory: str, problem: str) -> UserError:
    return UserError(
        f"data.root: the dataset in {directory} is half-written, {problem}; prepare or copy it "
        "again"
    )


def _read_text(directory: str, name: str) -> str | None:
    """Return a small file of a dataset; None if it does not exist."""
    try:
        return open_folder(directory).read_text(name)
    except FileNotFoundError:
        return None


def _read_json(directory: str, name: str) -> JsonObject:
    """Read a metadata file; an error names it if it is missing or truncated."""
    text = _read_text(directory, name)
    problem = "missing"
    if text is not None:
        try:
            return json.loads(text)
        except ValueError:
            problem = "broken off"
    raise _create_incomplete_error(directory, f"{name} is {problem}")


def _find_version(root: str, name: str) -> str:
    """Return the directory of a dataset's version: the one with dataset_info.json."""
    if not name:
        if "dataset_info.json" in list_directory(root):
            return root
        raise UserError("data.name is empty; name the TFDS dataset with --data.name or --data_set")
    match = _NAME.match(name)
    if match is None:
        raise UserError(
            f"data.name ({name}) is not a TFDS name; write name, name/config or name:1.0.0"
        )
    datasets = list_directory(root)
    if match["name"] not in datasets and root.rpartition("/")[2] == match["name"]:
        raise UserError(
            f"data.root ({root}) is the directory of {name} itself; name the one above it with "
            f"{ROOT_FLAGS}"
        )
    if match["name"] not in datasets:
        raise UserError(
            f"data.name ({name}): {root} holds no such dataset; "
            f"{get_hint(match['name'], datasets)} (set the directory with {ROOT_FLAGS})"
        )
    base = join_path(root, match["name"])
    if match["config"]:
        configs = [n for n in list_directory(base) if not _VERSION.match(n)]
        if match["config"] not in configs:
            raise UserError(
                f"data.name ({name}): {base} has no config {match['config']!r}; "
                f"{get_hint(match['config'], configs)}"
            )
        base = join_path(base, match["config"])
    return _pick_version(base, name, match["version"])


def _pick_version(base: str, name: str, wanted: str | None) -> str:
    entries = list_directory(base)
    versions = [n for n in entries if _VERSION.match(n)]
    pattern = re.escape(wanted or "*.*.*").replace(r"\*", r"\d+")
    fitting = [v for v in versions if re.fullmatch(pattern, v)]
    if not fitting:
        configs = [
            n for n in entries if any(_VERSION.match(v) for v in list_directory(join_path(base, n)))
        ]
        if not versions and configs:
            raise UserError(
                f"data.name ({name}) has configs; write {name}/CONFIG with one of "
                f"{', '.join(configs)}"
            )
        what = f"version {wanted}" if wanted else "finished version"
        raise UserError(
            f"data.name ({name}): {base} holds no {what}; "
            f"there: {', '.join(versions) or 'none'}; prepare the dataset or name another"
        )
    version = max(fitting, key=lambda v: tuple(int(n) for n in v.split(".")))
    directory = join_path(base, version)
    if "dataset_info.json" not in list_directory(directory):
        raise _create_incomplete_error(directory, "dataset_info.json is missing")
    return directory


def _fill(template: str, dataset: str, split: str, file_format: str, i: int, n: int) -> str:
    """Fill in TFDS's template of a file's name."""
    fields = {
        "DATASET": dataset,
        "SPLIT": split,
        "FILEFORMAT": file_format,
        "SHARD_INDEX": f"{i:05d}",
        "NUM_SHARDS": f"{n:05d}",
        "SHARD_X_OF_Y": f"{i:05d}-of-{n:05d}",
    }
    return re.sub(r"\{(\w+?)\}", lambda m: fields.get(m[1], m[0]), template)


def cut_files(
    paths: Sequence[P], lengths: Sequence[int], start: int, stop: int
) -> list[tuple[P, int, int]]:
    """Return the files of a split's examples [start, stop), with the range [a, b) in each."""
    pieces: list[tuple[P, int, int]] = []
    begin = 0
    for path, length in zip(paths, lengths, strict=True):
        first, last = max(start, begin), min(stop, begin + length)
        if first < last:
            pieces.append((path, first - begin, last - begin))
        begin += length
    return pieces
