"""Images in the Arrow files of Hugging Face's `datasets`, read by row.

Reads the output of `save_to_disk`, and the cache directory of a downloaded dataset. Their library
is not needed, and its name is that of a module of this project.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from big_vision.input.catalog import Segment, cut_files, open_local_root
from big_vision.input.images.encoded import EncodedRecords, EncodedSelection
from big_vision.input.images.image_files import ImageFiles
from big_vision.input.source import Role
from big_vision.input.splits import parse_split
from utils.errors import UserError, get_hint
from utils.json_types import JsonObject, JsonValue
from utils.storage.places import to_path

if TYPE_CHECKING:
    import pyarrow as pa

    from utils.config.data import DataSection

_DICT_FILE, _STATE_FILE, _INFO_FILE = "dataset_dict.json", "state.json", "dataset_info.json"
_CACHED = re.compile(r"^(?P<name>.+)-(?P<split>\w+?)(-\d+-of-\d+)?\.arrow$")
_FEATURES = b"huggingface"
# A stream of Arrow ends with these bytes; one without them is truncated.
_STREAM_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_WAY_OUT = "write it with its save_to_disk"


@dataclass(frozen=True)
class _Split:
    """One split on disk; the tables of its files are mapped into memory."""

    paths: tuple[str, ...]
    tables: tuple[pa.Table, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(len(table) for table in self.tables)

    @property
    def features(self) -> JsonObject:
        """Metadata of the columns that the library stores with the table."""
        metadata = (self.tables[0].schema.metadata or {}).get(_FEATURES)
        return json.loads(metadata).get("info", {}).get("features", {}) if metadata else {}


class ArrowSource(ImageFiles[EncodedSelection]):
    """A dataset of Hugging Face on disk: data.root / data.name, or data.root itself."""

    @property
    def title(self) -> str:
        return self.data.name or to_path(self.data.root).name or self.data.source

    def select_files(self, expression: str, key: str) -> EncodedSelection:
        return select_rows(self.data, expression, key)

    def load_labels(self, selection: EncodedSelection) -> np.ndarray:
        return selection.labels

    def open_records(self, selection: EncodedSelection, role: Role) -> ArrowRecords:
        return ArrowRecords(selection, self.data.image_key, self.data.label_key)


class ArrowRecords(EncodedRecords):
    """Rows of Arrow files, mapped into memory: only what is read is loaded."""

    def __init__(self, selection: EncodedSelection, image_key: str, label_key: str) -> None:
        super().__init__(selection, image_key, label_key)
        paths = dict.fromkeys(segment.path for segment in selection.segments)
        self._columns = {path: _open_table(Path(path))[image_key] for path in paths}

    def fetch(self, index: int) -> bytes:
        path, row = self.locate(index)
        cell = self._columns[path][row].as_py()
        image = cell["bytes"] if isinstance(cell, dict) else cell
        if image is None:
            raise OSError("the row holds no image")
        return image

    def get_name(self, index: int) -> str:
        return str(self.locate(index)[1])


def select_rows(data: DataSection, expression: str, key: str) -> EncodedSelection:
    """Select the rows of a split expression; of the files only the labels are read.

    Raises:
      UserError: names the directory, file, split or column that is wrong.
    """
    root = open_local_root(
        data.root,
        "Arrow files are mapped into memory",
        "copy the directory to this machine's disk, or write it as a TFDS dataset, which can be "
        "read from there",
    )
    directory, files = _find_splits(root, data.name)
    splits = _Splits(files)
    ranges = parse_split(expression, splits, key)
    segments: list[Segment] = []
    labels: list[np.ndarray] = []
    num_bytes = 0.0
    for part in ranges:
        split = splits.open(part.name)
        _check_image(split, data.image_key)
        split_labels = _get_labels(split, data.label_key)[part.start : part.stop]
        labels.append(split_labels)
        segments += [
            Segment(path, first, stop - first)
            for path, first, stop in cut_files(split.paths, split.lengths, part.start, part.stop)
        ]
        size = sum(Path(path).stat().st_size for path in split.paths)
        num_bytes += size * len(split_labels) / max(1, sum(split.lengths))
    class_names = _share_class_names(splits, [part.name for part in ranges], data.label_key, key)
    num_examples = sum(map(len, labels))
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
    """Split name -> rows of each of its files, opened on first use."""

    def __init__(self, files: dict[str, tuple[Path, ...]]) -> None:
        self._files = files
        self._open: dict[str, _Split] = {}

    def open(self, name: str) -> _Split:
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


def _find_splits(root: Path, name: str) -> tuple[Path, dict[str, tuple[Path, ...]]]:
    """Return the dataset's directory, and the Arrow files of each of its splits."""
    directory = root / name if name else root
    if not directory.is_dir():
        near = get_hint(name, [entry.name for entry in root.iterdir() if entry.is_dir()])
        raise UserError(f"data.name ({name}): {root} has no such directory; {near}")
    splits: dict[str, tuple[Path, ...]] = {}
    if (directory / _DICT_FILE).is_file():
        for split in _read_names(directory / _DICT_FILE, "splits"):
            splits[str(split)] = _list_saved(directory / str(split))
    elif (directory / _STATE_FILE).is_file():
        split = _read_json(directory / _STATE_FILE).get("_split") or "train"
        splits[split] = _list_saved(directory)
    elif (directory / _INFO_FILE).is_file():
        splits = _list_cached(directory)
    if not splits:
        raise UserError(f"data.root: {_explain_directory(directory)}")
    return directory, splits


def _list_saved(directory: Path) -> tuple[Path, ...]:
    """Return the files that save_to_disk lists."""
    entries = _read_names(directory / _STATE_FILE, "_data_files")
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
    paths = tuple(directory / str(name) for name in names)
    for path in paths:
        if not path.is_file():
            raise UserError(f"data.root: {path} is missing; copy the dataset again")
    return paths


def _read_names(path: Path, key: str) -> list[JsonValue]:
    """Read a list, which is never empty, from one of the library's files."""
    names = _read_json(path).get(key)
    if not isinstance(names, list) or not names:
        raise UserError(f"data.root: {path} lists no {key}; copy or write the dataset again")
    return names


def _list_cached(directory: Path) -> dict[str, tuple[Path, ...]]:
    """Return the files of a cached dataset by split, without caches of `map` in the same folder."""
    splits: dict[str, tuple[Path, ...]] = {}
    for path in sorted(directory.glob("*.arrow")):
        match = _CACHED.match(path.name)
        if match is not None and match["name"] != "cache":
            splits[match["split"]] = (*splits.get(match["split"], ()), path)
    return splits


def _explain_directory(directory: Path) -> str:
    """Explain why a directory is not a dataset in Arrow."""
    if any(next(directory.glob(where), None) for where in ("*.parquet", "*/*.parquet")):
        return (
            f"{directory} holds Parquet, whose compressed groups do not allow reading single "
            f"rows; load it with datasets.load_dataset and {_WAY_OUT}"
        )
    below = sorted(path.parent.name for path in directory.glob(f"*/{_DICT_FILE}"))
    below += sorted(path.parent.name for path in directory.glob(f"*/{_STATE_FILE}"))
    if below:
        return f"{directory} is the parent directory; set data.name to one of {', '.join(below)}"
    return (
        f"{directory} is not a dataset in Arrow, it has neither {_DICT_FILE} nor {_STATE_FILE}; "
        f"{_WAY_OUT}"
    )


def _read_json(path: Path) -> JsonObject:
    reason = "is not a description of a dataset"
    try:
        content = json.loads(path.read_text("utf-8"))
        if isinstance(content, dict):
            return content
    except FileNotFoundError:
        reason = "is missing"
    except ValueError:
        reason = "is truncated"
    raise UserError(f"data.root: {path} {reason}; copy or write the dataset again")


def _open_table(path: Path) -> pa.Table:
    """Map a file's rows into memory; UserError if it is no Arrow stream, or truncated."""
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
    """Return a column of each of a split's files."""
    names = split.tables[0].column_names
    if name not in names:
        hint = get_hint(name, names)
        raise UserError(f"{key} ({name}): {split.paths[0]} has no such column; {hint}")
    return [table[name] for table in split.tables]


def _check_image(split: _Split, image_key: str) -> None:
    """Raise a UserError unless the column holds encoded images, not paths and not pixels."""
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
            f"data.image_key ({image_key}): {empty} rows have no image, at most its path; "
            f"{_WAY_OUT}, which stores the images"
        )


def _get_labels(split: _Split, label_key: str) -> np.ndarray:
    """Return [rows] int64; zeros if labels are not read."""
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


def _share_class_names(
    splits: _Splits, names: Sequence[str], label_key: str, key: str
) -> tuple[str, ...] | None:
    """Return the class names, which all splits of an expression must have in the same order."""
    class_names: list[tuple[str, ...] | None] = []
    for name in names:
        feature = splits.open(name).features.get(label_key)
        values = feature.get("names") if isinstance(feature, dict) else None
        class_names.append(tuple(values) if values else None)  # None: a number without names
    first, *others = class_names
    for name, other in zip(names[1:], others, strict=True):
        if other != first:
            raise UserError(
                f"{key} joins {names[0]} and {name}, whose {label_key} has other classes, so that "
                "a number means different classes; use cast_column on one of them and save it again"
            )
    return first


def _name_type(kind: pa.DataType) -> str:
    """Return a short name of a type: `string`, `list<...>`."""
    text = str(kind)
    return text if len(text) < 40 else f"{text[:36]}..."
