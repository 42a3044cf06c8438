"""Images in a folder of class folders (`root/train/cat/1.jpg`), or with classes from a CSV."""

from __future__ import annotations

import csv
import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from big_vision.input.catalog import hash_files, open_local_root
from big_vision.input.selection import ImageSelection, list_some
from big_vision.input.splits import ALL, parse_split
from utils.errors import UserError, get_hint

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp"})
_SIZED_FILES = 1000
LOCAL_IMAGES = "single images are read"  # why data.root must be a local directory


@dataclass(frozen=True, kw_only=True)
class FolderSelection(ImageSelection):
    """Image files of a split expression, with their labels; a class folder may be empty."""

    directory: Path
    paths: tuple[Path, ...]
    labels: np.ndarray
    mean_record_bytes: float

    @property
    def files_hash(self) -> str:
        start = len(str(self.directory))
        return hash_files((str(path)[start:] for path in self.paths), self.mean_record_bytes)

    def list_empty_classes(self) -> tuple[str, ...]:
        """Return the names of class folders without an image."""
        filled = set(self.labels.tolist())
        names = enumerate(self.class_names or ())
        return tuple(name for number, name in names if number not in filled)

    def count_common(self, other: FolderSelection) -> int:
        """Count the files that are in both."""
        return len(set(self.paths) & set(other.paths))

    def get_name(self, index: int) -> str:
        """Return the file's path below the root."""
        return show_path(self.paths[index].relative_to(self.directory))


def measure_mean_bytes(paths: Sequence[Path]) -> float:
    """Return the mean size in bytes, of a sample of a thousand or two if there are more."""
    sampled = paths[:: max(1, len(paths) // _SIZED_FILES)]
    return sum(path.stat().st_size for path in sampled) / max(1, len(sampled))


def hash_name(name: str) -> bytes:
    """Return the key that images are ordered by: neighbours are then of mixed classes."""
    return hashlib.blake2b(name.encode(), digest_size=8).digest()


def is_hidden(name: str) -> bool:
    """Return whether a name begins with a dot, like `.ipynb_checkpoints` or macOS's `._000.jpg`."""
    return name.startswith(".")


def name_left_out(name: str) -> str:
    """Return the name under which a file that is left out is counted: `.db`, `hidden .jpg`."""
    suffix = Path(name).suffix.lower()
    return f"hidden {suffix}" if suffix in IMAGE_SUFFIXES else suffix or name


def show_path(path: Path) -> str:
    r"""Return a path as text that can be written everywhere: non-UTF-8 bytes as `\xff`."""
    return os.fsencode(path.as_posix()).decode("utf-8", "backslashreplace")


def select_folder(root: str, expression: str, key: str) -> FolderSelection:
    """Select the files of a split expression below `root`.

    `root/<split>/<class>/<image>`; the split `all` is `root/<class>/<image>`. Files are ordered by
    a hash of their names, so that a slice such as `train[:90%]` holds every class.
    """
    way_out = (
        "write them as a TFDS dataset with python -m tools.prepare_dataset and copy that there"
    )
    base = open_local_root(root, LOCAL_IMAGES, way_out)
    lists = _SplitLists(base, key)
    ranges = parse_split(expression, lists, key, lists.get_hint)
    names = {r.name: lists.classes[r.name] for r in ranges}
    if len(set(names.values())) > 1:
        raise UserError(
            f"{key} ({expression}): its splits have different classes; name one of them"
        )
    class_names = next(iter(names.values()))
    numbers = {name: number for number, name in enumerate(class_names)}
    paths = tuple(p for r in ranges for p in lists.files[r.name][r.start : r.stop])
    labels = np.array([numbers[p.parent.name] for p in paths], np.int64)
    counts = sum((lists.left_out[name] for name in names), Counter())
    return FolderSelection(
        num_examples=len(paths),
        num_classes=len(class_names),
        class_names=class_names,
        directory=base,
        paths=paths,
        labels=labels,
        mean_record_bytes=measure_mean_bytes(paths),
        left_out=format_counts(counts),
    )


class _SplitLists(dict[str, tuple[int, ...]]):
    """Split name -> number of files, listed when a split is first used."""

    def __init__(self, base: Path, key: str) -> None:
        super().__init__()
        self.files: dict[str, list[Path]] = {}
        self.classes: dict[str, tuple[str, ...]] = {}
        self.left_out: dict[str, Counter[str]] = {}
        self._base, self._key = base, key
        splits = [ALL, *(e.name for e in os.scandir(base) if e.is_dir() and not is_hidden(e.name))]
        self.update(dict.fromkeys(sorted(splits), ()))

    def get_hint(self, name: str) -> str:
        """Return the way out for an unknown split: maybe the classes are at the root."""
        classes = [split for split in self if split != ALL]
        if not any(_list_images(self._base / split)[0] for split in classes):
            return get_hint(name, self)
        above = f"name {self._base.parent} as the root, or " if self._base.name == name else ""
        return f"{self._base} holds class folders ({list_some(classes)}); {above}set the split all"

    def __getitem__(self, name: str) -> tuple[int, ...]:
        if name not in self.files:
            directory = self._base if name == ALL else self._base / name
            entries = _list_classes(directory, self._key)
            self.classes[name], self.files[name], self.left_out[name] = entries
        return (len(self.files[name]),)


def _list_images(directory: Path) -> tuple[list[Path], Counter[str]]:
    """List images by name, and count other files, hidden ones and folders next to them."""
    images: list[Path] = []
    others: Counter[str] = Counter()
    for entry in sorted(os.scandir(directory), key=lambda e: e.name):
        is_image = Path(entry.name).suffix.lower() in IMAGE_SUFFIXES
        if not entry.is_file():
            others["folder"] += 1
        elif is_image and not is_hidden(entry.name):
            images.append(directory / entry.name)
        else:
            others[name_left_out(entry.name)] += 1
    return images, others


def _list_classes(directory: Path, key: str) -> tuple[tuple[str, ...], list[Path], Counter[str]]:
    """Return class names, all images, ordered by a hash of class and file name, and other files."""
    folders = sorted(e.name for e in os.scandir(directory) if e.is_dir())
    names = tuple(name for name in folders if not is_hidden(name))
    files: list[Path] = []
    others = Counter(f"folder {name}" for name in folders if is_hidden(name))
    for name in names:
        images, beside = _list_images(directory / name)
        files += images
        others += beside
    if not files:
        hint = get_hint(directory.name, names) if names else "it has no class folders"
        raise UserError(f"{key}: {directory} holds no images in class folders; {hint}")
    return (
        names,
        sorted(files, key=lambda path: hash_name(f"{path.parent.name}/{path.name}")),
        others,
    )


def format_counts(counts: Counter[str]) -> tuple[str, ...]:
    """Return `3 .tiff` and so on, in the order of names."""
    return tuple(f"{count} {name}" for name, count in sorted(counts.items()))


_COLUMNS = ("file", "labels")
_SEPARATOR = "|"


@dataclass(frozen=True, kw_only=True)
class ListedSelection(FolderSelection):
    """The images of a list, each with any number of classes: `labels` [N] are texts such as 0 3."""

    def list_empty_classes(self) -> tuple[str, ...]:
        """Return nothing: a split may lack some classes of the whole list."""
        return ()

    @property
    def files_hash(self) -> str:
        """Hash of the files and their classes."""
        start = len(str(self.directory))
        lines = [str(path)[start:] for path in self.paths]
        return hash_files([*lines, *self.labels.tolist()], self.mean_record_bytes)


def select_listed(root: str, expression: str, key: str, name: str) -> ListedSelection:
    """Select the listed files of a split expression.

    A split is the first folder of the files' names, `all` is all of them. The classes are those in
    the whole list, in alphabetical order; files are ordered by a hash of their names.
    """
    base = open_local_root(root, LOCAL_IMAGES, "write them as a TFDS dataset and copy that there")
    if not _is_below(name):
        raise UserError(
            f"data.labels_file ({name}) must be a path below data.root; write it relative to that"
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
    numbers = {label: number for number, label in enumerate(classes)}
    labels = [" ".join(str(numbers[label]) for label in sorted(rows[file])) for file in files]
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
    """Read the classes of each file.

    Raises:
      UserError: the list is missing, has other columns, or names a file twice.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        names = sorted(entry.name for entry in path.parent.glob("*.csv"))
        hint = f"; {get_hint(path.name, names)}" if names else ""
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
                f"{lines.line_num}; join classes by {_SEPARATOR}, and quote cells with a comma"
            )
        file = line["file"].strip()
        file = PurePosixPath(file).as_posix() if file else file
        if not _is_below(file):
            raise UserError(
                f"data.labels_file ({name}) lists {file}, which is not below data.root; write it "
                "relative to that"
            )
        if file in rows:
            raise UserError(f"data.labels_file ({name}) lists {file} twice; join its rows")
        parts = ((line["labels"] or "").split(_SEPARATOR)) if line["labels"] else []
        rows[file] = frozenset(part.strip() for part in parts if part.strip())
    return rows


def _is_below(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts
