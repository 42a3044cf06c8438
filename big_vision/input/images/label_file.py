"""A folder of images whose classes a CSV lists: `train/1.jpg,cat|dog`."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from big_vision.input.catalog import hash_files, open_root
from big_vision.input.images.folder import FolderSelection, hash_name, measure_mean_bytes
from big_vision.input.splits import ALL, parse_split
from utils.errors import UserError, get_hint
from utils.storage.places import is_remote, to_path

_COLUMNS = ("file", "labels")
_SEPARATOR = "|"


@dataclass(frozen=True, kw_only=True)
class ListedSelection(FolderSelection):
    """The images of a list, each with any number of classes: `labels` [N] are texts such as 0 3."""

    def list_empty_classes(self) -> tuple[str, ...]:
        """Return nothing: classes are those of the whole list, of which a split may lack some."""
        return ()

    @property
    def files_hash(self) -> str:
        """As of a folder's files; the classes count as well."""
        start = len(str(self.directory))
        lines = [str(path)[start:] for path in self.paths]
        return hash_files([*lines, *self.labels.tolist()], self.mean_record_bytes)


def select_listed(root: str, expression: str, key: str, name: str) -> ListedSelection:
    """The listed files of a split expression.

    A split is the first folder of the files' names, `all` is all of them. Classes are all that the
    list names anywhere, in alphabetical order; files are ordered by a hash of their names.
    """
    if is_remote(root):
        raise UserError(
            f"data.root ({root}) is a URL, but images one by one are read from local folders "
            "alone; write them as a TFDS dataset and copy that there"
        )
    base = to_path(open_root(root))
    if not _is_below(name):
        raise UserError(
            f"data.labels_file ({name}) is no file below data.root; name it as it lies there"
        )
    rows = _read_rows(base / name, name)
    classes = tuple(sorted(set().union(*rows.values())))
    if not classes:
        raise UserError(f"data.labels_file ({name}) names no class; fill its column labels")
    splits: dict[str, list[str]] = {ALL: sorted(rows, key=hash_name)}
    for file in splits[ALL]:
        if "/" in file:
            splits.setdefault(file.partition("/")[0], []).append(file)
    lengths = {split: (len(files),) for split, files in splits.items()}
    ranges = parse_split(expression, lengths, key)
    files = [file for r in ranges for file in splits[r.name][r.start : r.stop]]
    paths = tuple(base / file for file in files)
    missing = [file for file in files if not (base / file).is_file()]
    if missing:
        raise UserError(
            f"data.labels_file ({name}) lists {missing[0]}, which is not below {base}; copy it "
            "there or take its row out"
        )
    numbers = {one: number for number, one in enumerate(classes)}
    labels = [" ".join(str(numbers[one]) for one in sorted(rows[file])) for file in files]
    return ListedSelection(
        num_examples=len(files),
        num_classes=len(classes),
        class_names=classes,
        several_labels=True,
        directory=base,
        paths=paths,
        labels=np.array(labels, str),
        mean_record_bytes=measure_mean_bytes(paths),
    )


def _read_rows(path: Path, name: str) -> dict[str, frozenset[str]]:
    """File -> its classes.

    Raises:
      UserError: the list is not there, has other columns, or names a file twice.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        beside = sorted(one.name for one in path.parent.glob("*.csv"))
        hint = f"; {get_hint(path.name, beside)}" if beside else ""
        raise UserError(
            f"data.labels_file ({name}) cannot be read below data.root ({error}){hint}"
        ) from error
    lines = csv.DictReader(text.splitlines())
    if not set(_COLUMNS) <= set(lines.fieldnames or ()):
        raise UserError(
            f"data.labels_file ({name}) has the columns {', '.join(lines.fieldnames or ())}; begin "
            "it with file,labels"
        )
    rows: dict[str, frozenset[str]] = {}
    for line in lines:
        if None in line or line["file"] is None:
            raise UserError(
                f"data.labels_file ({name}) has more or fewer cells than columns in line "
                f"{lines.line_num}; join classes by {_SEPARATOR}, and quote what holds a comma"
            )
        file = line["file"].strip()
        file = PurePosixPath(file).as_posix() if file else file
        if not _is_below(file):
            raise UserError(
                f"data.labels_file ({name}) lists {file}, which is not below data.root; name it as "
                "it lies there"
            )
        if file in rows:
            raise UserError(f"data.labels_file ({name}) lists {file} twice; join its rows")
        parts = ((line["labels"] or "").split(_SEPARATOR)) if line["labels"] else []
        rows[file] = frozenset(part.strip() for part in parts if part.strip())
    return rows


def _is_below(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts
