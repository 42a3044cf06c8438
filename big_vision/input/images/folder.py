"""A folder of class folders: `root/train/cat/1.jpg`. Its classes, files and order."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from big_vision.input.catalog import hash_files, open_root
from big_vision.input.selection import ImageSelection, list_some
from big_vision.input.splits import ALL, parse_split
from utils.errors import UserError, get_hint
from utils.storage.places import is_remote, to_path

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp"})
_SIZED_FILES = 1000


@dataclass(frozen=True, kw_only=True)
class FolderSelection(ImageSelection):
    """The image files that a split expression selects, with their labels.

    A class is a class folder, also one without an image.
    """

    directory: Path
    paths: tuple[Path, ...]
    labels: np.ndarray
    mean_record_bytes: float

    @property
    def files_hash(self) -> str:
        """What tells these files from others, wherever the root lies."""
        start = len(str(self.directory))
        return hash_files((str(path)[start:] for path in self.paths), self.mean_record_bytes)

    def list_empty_classes(self) -> tuple[str, ...]:
        """Return the names of class folders without an image."""
        filled = set(self.labels.tolist())
        names = enumerate(self.class_names or ())
        return tuple(name for number, name in names if number not in filled)

    def count_common(self, other: FolderSelection) -> int:
        """Files that are in both."""
        return len(set(self.paths) & set(other.paths))

    def get_name(self, index: int) -> str:
        """The file's path below the root."""
        return show_path(self.paths[index].relative_to(self.directory))


def measure_mean_bytes(paths: Sequence[Path]) -> float:
    """Mean size in bytes, of a thousand or two of them where they are more."""
    sampled = paths[:: max(1, len(paths) // _SIZED_FILES)]
    return sum(path.stat().st_size for path in sampled) / max(1, len(sampled))


def hash_name(name: str) -> bytes:
    """What images are ordered by: so neighbours are of no one class, wherever they lie."""
    return hashlib.blake2b(name.encode(), digest_size=8).digest()


def is_hidden(name: str) -> bool:
    """Return whether a name begins with a dot, as `.ipynb_checkpoints` or macOS's `._000.jpg`."""
    return name.startswith(".")


def name_left_out(name: str) -> str:
    """Return what a file that is no image, or a hidden one, is counted as: `.db`, `hidden .jpg`."""
    suffix = Path(name).suffix.lower()
    return f"hidden {suffix}" if suffix in IMAGE_SUFFIXES else suffix or name


def show_path(path: Path) -> str:
    r"""A path as text that can be written everywhere: bytes that are no UTF-8 as `\xff`."""
    return os.fsencode(path.as_posix()).decode("utf-8", "backslashreplace")


def select_folder(root: str, expression: str, key: str) -> FolderSelection:
    """The files of a split expression below `root`.

    `root/<split>/<class>/<image>`; the split `all` is `root/<class>/<image>`. Files are ordered by
    a hash of their names, so a slice such as `train[:90%]` holds every class.
    """
    if is_remote(root):
        raise UserError(
            f"data.root ({root}) is a URL, but images one by one are read from local folders "
            "alone; write them as a TFDS dataset with python -m tools.prepare_dataset and copy "
            "that there"
        )
    base = to_path(open_root(root))
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
    left_out = tuple(f"{count} {what}" for what, count in sorted(counts.items()))
    return FolderSelection(
        num_examples=len(paths),
        num_classes=len(class_names),
        class_names=class_names,
        directory=base,
        paths=paths,
        labels=labels,
        mean_record_bytes=measure_mean_bytes(paths),
        left_out=left_out,
    )


class _SplitLists(dict[str, tuple[int, ...]]):
    """Split name -> number of files, listed when a split is first asked for."""

    def __init__(self, base: Path, key: str) -> None:
        super().__init__()
        self.files: dict[str, list[Path]] = {}
        self.classes: dict[str, tuple[str, ...]] = {}
        self.left_out: dict[str, Counter[str]] = {}
        self._base, self._key = base, key
        splits = [ALL, *(e.name for e in os.scandir(base) if e.is_dir() and not is_hidden(e.name))]
        self.update(dict.fromkeys(sorted(splits), ()))

    def get_hint(self, name: str) -> str:
        """Return the way out where there is no split of a name: maybe classes lie at the root."""
        classes = [split for split in self if split != ALL]
        if not any(_list_images(self._base / split)[0] for split in classes):
            return get_hint(name, self)
        above = f"name {self._base.parent} as the root, or " if self._base.name == name else ""
        return f"{self._base} holds class folders ({list_some(classes)}); {above}set the split all"

    def __getitem__(self, name: str) -> tuple[int, ...]:
        if name not in self.files:
            directory = self._base if name == ALL else self._base / name
            found = _list_classes(directory, self._key)
            self.classes[name], self.files[name], self.left_out[name] = found
        return (len(self.files[name]),)


def _list_images(directory: Path) -> tuple[list[Path], Counter[str]]:
    """Images by name, and how many other files, hidden ones and folders lie beside them."""
    images, others = [], Counter()
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
    """Class names, all images, ordered by a hash of class and file name, and what is no image."""
    folders = sorted(e.name for e in os.scandir(directory) if e.is_dir())
    names = tuple(name for name in folders if not is_hidden(name))
    files, others = [], Counter(f"folder {name}" for name in folders if is_hidden(name))
    for name in names:
        images, beside = _list_images(directory / name)
        files += images
        others += beside
    if not files:
        hint = get_hint(directory.name, names) if names else "it has no class folders"
        raise UserError(f"{key}: {directory} holds no images in class folders; {hint}")
    return names, sorted(files, key=lambda one: hash_name(f"{one.parent.name}/{one.name}")), others
