"""Images in the Arrow files of Hugging Face's `datasets`, reached by row.

What `save_to_disk` writes is read, and the directory in which a downloaded dataset is cached. Their
library is not needed, and its name is that of a module of this project.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from big_vision.input.catalog import Segment, cut_files, open_root
from big_vision.input.images.encoded import EncodedRecords, EncodedSelection
from big_vision.input.images.image_files import ImageFiles
from big_vision.input.source import Role
from big_vision.input.splits import parse_split
from utils.errors import UserError, get_hint
from utils.json_types import JsonObject
from utils.storage.places import is_remote, to_path

if TYPE_CHECKING:
    import pyarrow as pa

    from big_vision.pp.shapes import Sides
    from utils.config.data import DataSection

_DICT_FILE, _STATE_FILE, _INFO_FILE = "dataset_dict.json", "state.json", "dataset_info.json"
_CACHED = re.compile(r"^(?P<name>.+)-(?P<split>\w+?)(-\d+-of-\d+)?\.arrow$")
_FEATURES = b"huggingface"
# A stream of Arrow ends with these bytes; one without them is not whole.
_STREAM_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_WAY_OUT = "write it with its save_to_disk"


@dataclass(frozen=True)
class _Split:
    """One split as it lies on disk.

    Attributes:
      tables: its files' tables, mapped into memory.
    """

    paths: tuple[str, ...]
    tables: tuple[pa.Table, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Rows of each file."""
        return tuple(len(table) for table in self.tables)

    @property
    def features(self) -> JsonObject:
        """What the library notes of each column, beside the table."""
        found = (self.tables[0].schema.metadata or {}).get(_FEATURES)
        return json.loads(found).get("info", {}).get("features", {}) if found else {}


class ArrowSource(ImageFiles):
    """A dataset of Hugging Face on disk: data.root / data.name, or data.root itself."""

    @property
    def title(self) -> str:
        """What data.name calls it, or the directory's name."""
        return self.data.name or to_path(self.data.root).name or self.data.source

    def select_files(self, expression: str, key: str) -> EncodedSelection:
        """The rows of a split expression."""
        return select_rows(self.data, expression, key)

    def get_sides(self) -> Sides:
        """Nobody has looked into the images: they may be of any size."""
        return None, None, None

    def open_records(self, selection: EncodedSelection, role: Role) -> ArrowRecords:
        """Rows of memory-mapped tables."""
        return ArrowRecords(selection, self.data.image_key, self.data.label_key)


class ArrowRecords(EncodedRecords):
    """Rows of Arrow files, mapped into memory: only what is read is loaded."""

    def __init__(self, selection: EncodedSelection, image_key: str, label_key: str) -> None:
        super().__init__(selection, image_key, label_key)
        paths = dict.fromkeys(segment.path for segment in selection.segments)
        self._columns = {path: _open_table(Path(path))[image_key] for path in paths}

    def fetch(self, index: int) -> bytes:
        """The image as it was encoded."""
        path, row = self.locate(index)
        cell = self._columns[path][row].as_py()
        found = cell["bytes"] if isinstance(cell, dict) else cell
        if found is None:
            raise OSError("the row holds no image")
        return found

    def get_name(self, index: int) -> str:
        """The row's number in its file."""
        return str(self.locate(index)[1])


def select_rows(data: DataSection, expression: str, key: str) -> EncodedSelection:
    """The rows of a split expression, from files that are looked through for their labels alone.

    Raises:
      UserError: names the directory, file, split or column that is wrong.
    """
    if is_remote(data.root):
        raise UserError(
            f"data.root ({data.root}) is a URL, but Arrow files are mapped into memory from local "
            "folders alone; copy the directory to this machine's disk, or write it as a TFDS "
            "dataset, which is read from there"
        )
    directory, files = _find_splits(data)
    splits = _Splits(files)
    ranges = parse_split(expression, splits, key)
    segments, labels, num_bytes = [], [], 0.0
    for part in ranges:
        split = splits.open(part.name)
        _check_image(split, data.image_key)
        found = _get_labels(split, data.label_key)[part.start : part.stop]
        labels.append(found)
        segments += [
            Segment(path, first, stop - first)
            for path, first, stop in cut_files(split.paths, split.lengths, part.start, part.stop)
        ]
        size = sum(Path(path).stat().st_size for path in split.paths)
        num_bytes += size * len(found) / max(1, sum(split.lengths))
    class_names = _share_class_names(splits, [part.name for part in ranges], data.label_key, key)
    num_examples = sum(len(found) for found in labels)
    return EncodedSelection(
        num_examples=num_examples,
        num_classes=None if class_names is None else len(class_names),
        class_names=class_names,
        directory=str(directory),
        file_format="arrow",
        segments=tuple(segments),
        mean_record_bytes=num_bytes / num_examples,
        labels=np.concatenate(labels),
    )


class _Splits(Mapping[str, tuple[int, ...]]):
    """Split name -> rows of each of its files, opened when it is first asked for."""

    def __init__(self, files: dict[str, tuple[Path, ...]]) -> None:
        self._files = files
        self._open: dict[str, _Split] = {}

    def open(self, name: str) -> _Split:
        """The split's tables."""
        if name not in self._open:
            paths = self._files[name]
            tables = tuple(_open_table(path) for path in paths)
            self._open[name] = _Split(tuple(str(path) for path in paths), tables)
        return self._open[name]

    def __getitem__(self, name: str) -> tuple[int, ...]:
        return self.open(name).lengths

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _find_splits(data: DataSection) -> tuple[Path, dict[str, tuple[Path, ...]]]:
    """The dataset's directory, and the Arrow files of each of its splits."""
    root = to_path(open_root(data.root))
    directory = root / data.name if data.name else root
    if not directory.is_dir():
        near = get_hint(data.name, [entry.name for entry in root.iterdir() if entry.is_dir()])
        raise UserError(f"data.name ({data.name}): {root} holds no such directory; {near}")
    splits: dict[str, tuple[Path, ...]] = {}
    if (directory / _DICT_FILE).is_file():
        for name in _read_names(directory / _DICT_FILE, "splits"):
            splits[str(name)] = _list_saved(directory / str(name))
    elif (directory / _STATE_FILE).is_file():
        name = _read_json(directory / _STATE_FILE).get("_split") or "train"
        splits[name] = _list_saved(directory)
    elif (directory / _INFO_FILE).is_file():
        splits = _list_cached(directory)
    if not splits:
        raise UserError(f"data.root: {_explain_directory(directory)}")
    return directory, splits


def _list_saved(directory: Path) -> tuple[Path, ...]:
    """The files of what save_to_disk wrote, which names them."""
    found = _read_names(directory / _STATE_FILE, "_data_files")
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in found]
    paths = tuple(directory / str(name) for name in names)
    for path in paths:
        if not path.is_file():
            raise UserError(f"data.root: {path} is missing; copy the dataset again")
    return paths


def _read_names(path: Path, key: str) -> list[Any]:
    """A list that one of the library's files holds; it is never empty."""
    found = _read_json(path).get(key)
    if not isinstance(found, list) or not found:
        raise UserError(f"data.root: {path} lists no {key}; copy or write the dataset again")
    return found


def _list_cached(directory: Path) -> dict[str, tuple[Path, ...]]:
    """The files of a cached dataset by split; what `map` has cached beside them is none of it."""
    splits: dict[str, tuple[Path, ...]] = {}
    for path in sorted(directory.glob("*.arrow")):
        match = _CACHED.match(path.name)
        if match is not None and match["name"] != "cache":
            splits[match["split"]] = (*splits.get(match["split"], ()), path)
    return splits


def _explain_directory(directory: Path) -> str:
    """What a directory is that holds no dataset in Arrow."""
    if any(next(directory.glob(where), None) for where in ("*.parquet", "*/*.parquet")):
        return (
            f"{directory} holds Parquet, whose rows lie in compressed groups and cannot be reached "
            f"one by one; load it with datasets.load_dataset and {_WAY_OUT}"
        )
    below = sorted(path.parent.name for path in directory.glob(f"*/{_DICT_FILE}"))
    below += sorted(path.parent.name for path in directory.glob(f"*/{_STATE_FILE}"))
    if below:
        return f"{directory} is the directory above; name one with data.name: {', '.join(below)}"
    return (
        f"{directory} is no dataset in Arrow, it has neither {_DICT_FILE} nor {_STATE_FILE}; "
        f"{_WAY_OUT}"
    )


def _read_json(path: Path) -> JsonObject:
    reason = "is no description of a dataset"
    try:
        found = json.loads(path.read_text("utf-8"))
        if isinstance(found, dict):
            return found
    except FileNotFoundError:
        reason = "is missing"
    except ValueError:
        reason = "is broken off"
    raise UserError(f"data.root: {path} {reason}; copy or write the dataset again")


def _open_table(path: Path) -> pa.Table:
    """A file's rows, mapped into memory.

    Raises:
      UserError: it is no stream of Arrow, or it ends before its end.
    """
    import pyarrow as pa

    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - len(_STREAM_END)))
        is_whole = file.read() == _STREAM_END
    try:
        if is_whole:
            return pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
        reason = "it is cut short"
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
    raise UserError(f"data.root: {path} cannot be read as Arrow ({reason}); copy it again")


def _get_column(split: _Split, key: str, name: str) -> list[pa.ChunkedArray]:
    """A column of each of a split's files."""
    names = split.tables[0].column_names
    if name not in names:
        raise UserError(f"{key} ({name}): {split.paths[0]} has no such column; "
                        f"{get_hint(name, names)}")  # fmt: skip
    return [table[name] for table in split.tables]


def _check_image(split: _Split, image_key: str) -> None:
    """The column must hold encoded images, not paths of them and not pixels."""
    import pyarrow as pa
    import pyarrow.compute as pc

    columns = _get_column(split, "data.image_key", image_key)
    kind = columns[0].type
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        columns = [pc.struct_field(column, "bytes") for column in columns]
    elif not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        raise UserError(
            f"data.image_key ({image_key}) is a column of {_name_type(kind)}, not of encoded "
            "images; cast it to datasets.Image and save it again"
        )
    empty = sum(column.null_count for column in columns)
    if empty:
        raise UserError(
            f"data.image_key ({image_key}): {empty} rows hold no image, at most the path of one; "
            f"{_WAY_OUT}, which puts the images in"
        )


def _get_labels(split: _Split, label_key: str) -> np.ndarray:
    """[rows] int64; zeros where labels are not read."""
    import pyarrow as pa

    if not label_key:
        return np.zeros(sum(split.lengths), np.int64)
    columns = _get_column(split, "data.label_key", label_key)
    kind = columns[0].type
    if not pa.types.is_integer(kind):
        raise UserError(
            f"data.label_key ({label_key}) is a column of {_name_type(kind)}, but a label is one "
            "whole number; make it one with class_encode_column and save the dataset again"
        )
    empty = sum(column.null_count for column in columns)
    if empty:
        raise UserError(
            f"data.label_key ({label_key}): {empty} rows have none; leave them out with filter and "
            "save the dataset again"
        )
    return np.concatenate([column.to_numpy() for column in columns]).astype(np.int64)


def _get_class_names(split: _Split, label_key: str) -> tuple[str, ...] | None:
    """The names that a ClassLabel has; none: the label is a number without names."""
    feature: Any = split.features.get(label_key)
    names = feature.get("names") if isinstance(feature, dict) else None
    return tuple(names) if names else None


def _share_class_names(
    splits: _Splits, names: Sequence[str], label_key: str, key: str
) -> tuple[str, ...] | None:
    """The names of the classes, which all splits of an expression must have in the same order."""
    first, *others = [_get_class_names(splits.open(name), label_key) for name in names]
    for name, other in zip(names[1:], others, strict=True):
        if other != first:
            raise UserError(
                f"{key} joins {names[0]} and {name}, whose {label_key} has other classes, so that "
                "a number means another class in each; cast one of them by cast_column and save it "
                "again"
            )
    return first


def _name_type(kind: pa.DataType) -> str:
    """A type in one short phrase: `string`, `list<...>`."""
    text = str(kind)
    return text if len(text) < 40 else f"{text[:36]}..."
