"""Images in WebDataset shards of tar files, read by offset."""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from big_vision.input.catalog import Segment, cut_files, open_local_root
from big_vision.input.images.encoded import EncodedRecords, EncodedSelection, number_labels
from big_vision.input.images.folder import IMAGE_SUFFIXES, is_hidden
from big_vision.input.images.image_files import ImageFiles
from big_vision.input.images.tar_index import MemberKeys, scan_tar
from big_vision.input.index_cache import Arrays, load_index
from big_vision.input.source import Role
from big_vision.input.splits import ALL, parse_split
from utils.errors import UserError, get_hint
from utils.storage.places import to_path

if TYPE_CHECKING:
    from utils.config.data import DataSection

_NAMES_FILE = "classnames.txt"
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_SUFFIXES = (".tar", *_COMPRESSED)
_NUMBER = re.compile(r"[-_.]?\d+(-of-\d+)?$")
_BRACES = re.compile(r"\{(?P<inside>[^{}]*)\}")
_RANGE = re.compile(r"^(?P<first>\d+)\.\.(?P<last>\d+)$")
_LAYOUT = "a tar of examples holds NAME.jpg and NAME.cls, the class's number"


@dataclass(frozen=True, kw_only=True)
class TarSelection(EncodedSelection):
    """Examples of a split expression."""

    # offsets, sizes: [num_examples] int64, of the encoded images in their files
    offsets: np.ndarray
    sizes: np.ndarray
    names: np.ndarray  # [num_examples] bytes, UTF-8


class WebdatasetSource(ImageFiles[TarSelection]):
    """Tars of images: data.root / train-0000.tar, or data.root / train / 0000.tar."""

    @property
    def title(self) -> str:
        return self.data.name or to_path(self.data.root).name or self.data.source

    def select_files(self, expression: str, key: str) -> TarSelection:
        return select_tars(self.data, expression, key)

    def load_labels(self, selection: TarSelection) -> np.ndarray:
        return selection.labels

    def open_records(self, selection: TarSelection, role: Role) -> TarRecords:
        return TarRecords(selection, self.data.image_key, self.data.label_key)


class TarRecords(EncodedRecords):
    """Members of uncompressed tars, read at their offsets."""

    selection: TarSelection

    def fetch(self, index: int) -> bytes:
        selection = self.selection
        # Opened each time: a set may have more tars than a process may have open files.
        with Path(self.locate(index)[0]).open("rb", buffering=0) as file:
            return os.pread(
                file.fileno(), int(selection.sizes[index]), int(selection.offsets[index])
            )

    def get_name(self, index: int) -> str:
        return self.selection.names[index].decode()


def select_tars(data: DataSection, expression: str, key: str) -> TarSelection:
    """Select the examples of a split expression, whose names stand for tars below data.root.

    Each tar is scanned once, and its index is cached.

    Raises:
      UserError: names the tar, the pattern, the label or the key that is wrong.
    """
    base = open_local_root(
        data.root,
        "tars are read at offsets",
        "copy them to this machine's disk, or write them as a TFDS dataset, which can be read from "
        "there",
    )
    shards = _ShardLists(base, _choose_members(data), key)
    ranges = parse_split(expression, shards, key)
    pieces = [
        piece
        for r in ranges
        for piece in cut_files(shards.files[r.name], shards[r.name], r.start, r.stop)
    ]
    arrays = {
        name: np.concatenate(
            [shards.indexes[path][name][first:stop] for path, first, stop in pieces]
        )
        for name in ("names", "offsets", "sizes", "labels")
    }
    left_out = {
        what: sum(int(shards.indexes[path][name]) for path, _, _ in pieces)
        for name, what in (
            ("without_image", "examples without an image"),
            ("hidden", "hidden files"),
        )
    }
    class_names = _read_class_names(base)
    starts = np.cumsum([0, *(stop - first for _, first, stop in pieces[:-1])])

    def describe(index: int) -> str:
        tar = pieces[int(np.searchsorted(starts, index, side="right")) - 1][0]
        return f"{tar}, {arrays['names'][index].decode()}"

    return TarSelection(
        num_examples=len(arrays["sizes"]),
        num_classes=None if class_names is None else len(class_names),
        class_names=class_names,
        directory=str(base),
        file_format="tar",
        segments=tuple(Segment(str(path), first, stop - first) for path, first, stop in pieces),
        mean_record_bytes=float(arrays["sizes"].mean()),
        left_out=tuple(f"{count} {what}" for what, count in left_out.items() if count),
        labels=number_labels(arrays["labels"], class_names, data.label_key, describe)
        if data.label_key
        else np.zeros(len(arrays["sizes"]), np.int64),
        offsets=arrays["offsets"],
        sizes=arrays["sizes"],
        names=arrays["names"],
    )


def _choose_members(data: DataSection) -> MemberKeys:
    """Return the endings of image and label; default keys mean the layout's usual ones."""
    images = tuple(sorted(suffix[1:] for suffix in IMAGE_SUFFIXES))
    if data.image_key != "image":
        images = tuple(data.image_key.lower().split(";"))
    if data.label_key == "label":
        return MemberKeys(images, "cls")
    ending, *path = data.label_key.split("/")
    return MemberKeys(images, ending.lower(), tuple(path))


class _ShardLists(dict[str, tuple[int, ...]]):
    """Name or pattern -> examples of each of its tars, scanned on first use.

    Attributes:
      files: the tars of each name that was used.
      indexes: the index of each tar.
    """

    def __init__(self, base: Path, members: MemberKeys, key: str) -> None:
        super().__init__()
        self.files: dict[str, tuple[Path, ...]] = {}
        self.indexes: dict[Path, Arrays] = {}
        self._base, self._members, self._key = base, members, key
        self._groups = _group_shards(base)
        self.update(dict.fromkeys(self._groups, ()))

    def __contains__(self, name: object) -> bool:
        is_pattern = any(sign in str(name) for sign in "{*?") or str(name).endswith(_SUFFIXES)
        return super().__contains__(name) or is_pattern

    def __getitem__(self, name: str) -> tuple[int, ...]:
        if name not in self.files:
            files = self._groups.get(name) or self._match(name)
            self._look_through(files)
            self.files[name] = files
        return tuple(len(self.indexes[path]["sizes"]) for path in self.files[name])

    def _match(self, pattern: str) -> tuple[Path, ...]:
        """Return the tars of a pattern, in the order of its range."""
        below = {path.relative_to(self._base).as_posix(): path for path in self._groups[ALL]}
        matches: dict[Path, None] = {}
        for part in expand_braces(pattern):
            names = [name for name in below if fnmatchcase(name, part)]
            if not names:
                missing = "" if part == pattern else f", {part},"
                hint = get_hint(pattern, [*below, *self])
                raise UserError(
                    f"{self._key} ({pattern}){missing} matches no tar in {self._base}; {hint}"
                )
            matches |= dict.fromkeys(below[name] for name in names)
        return tuple(matches)

    def _look_through(self, files: tuple[Path, ...]) -> None:
        """Load the index of each tar; a UserError if one cannot be read by offset."""
        for path in files:
            if path.name.endswith(_COMPRESSED):
                raise UserError(
                    f"{self._key}: {path} is compressed, so that an image cannot be read without "
                    "all before it; unpack it to a plain .tar (images do not get smaller by it)"
                )
        bar = tqdm(files, desc="index tars", unit="file", disable=None)
        for path in bar:
            if path not in self.indexes:
                self.indexes[path] = load_index(
                    [str(path)],
                    lambda path=path: scan_tar(path, self._members),
                    "tar without hidden",
                    str(self._members),
                )
                self._check(path, self.indexes[path])

    def _check(self, path: Path, index: Arrays) -> None:
        """Raise a UserError for images without a label, which would train a wrong class."""
        endings = ", ".join(index["endings"].tolist()) or "nothing"
        if not len(index["sizes"]):
            raise UserError(
                f"data.image_key: {path} holds no image {'/'.join(self._members.images)} among "
                f"{endings}; name the image's ending there, as jpg or webp;png"
            )
        missing = np.flatnonzero(index["labels"] == b"")
        if not len(missing) or not self._members.label:
            return
        what = "/".join((self._members.label, *self._members.path))
        if len(missing) == len(index["labels"]):
            raise UserError(
                f"data.label_key: {path} holds no label {what}, only {endings}; {_LAYOUT}, or name "
                "another ending, json/FIELD for a field of its JSON"
            )
        raise UserError(
            f"data.label_key: {path} holds {len(missing)} examples without a label {what}, the "
            f"first is {index['names'][missing[0]].decode()}; add it or leave them out"
        )


def _group_shards(base: Path) -> dict[str, tuple[Path, ...]]:
    """Return split name -> its tars; `all` is every one.

    `train-0000.tar` and `train_1.tar` belong to `train`, and so does `train/0000.tar`.
    """
    groups: dict[str, list[Path]] = {}
    every: list[Path] = []
    folders = sorted(e.name for e in os.scandir(base) if e.is_dir() and not is_hidden(e.name))
    for folder in ("", *folders):
        for path in sorted((base / folder).iterdir()):
            suffix = next((s for s in _SUFFIXES if path.name.endswith(s)), None)
            if suffix is None or is_hidden(path.name) or not path.is_file():
                continue
            name = folder or _NUMBER.sub("", path.name.removesuffix(suffix))
            every.append(path)
            groups.setdefault(name, []).append(path)
    if not every:
        raise UserError(f"data.root ({base}) holds no .tar, nor do its folders; {_LAYOUT}")
    groups.pop("", None)
    return {**{name: tuple(paths) for name, paths in groups.items()}, ALL: tuple(every)}


def expand_braces(pattern: str) -> list[str]:
    """Expand `a-{000..015}.tar` and `{a,b}.tar` like a shell."""
    match = _BRACES.search(pattern)
    if match is None:
        return [pattern]
    span = _RANGE.match(match["inside"])
    if span is None:
        inner = match["inside"].split(",")
    else:
        width = len(span["first"])
        first, last = int(span["first"]), int(span["last"])
        way = 1 if first <= last else -1
        inner = [f"{n:0{width}d}" for n in range(first, last + way, way)]
    head, tail = pattern[: match.start()], pattern[match.end() :]
    return [*itertools.chain.from_iterable(expand_braces(head + part + tail) for part in inner)]


def _read_class_names(base: Path) -> tuple[str, ...] | None:
    """Read the lines of classnames.txt next to the tars; None if there is no such file."""
    path = base / _NAMES_FILE
    if not path.is_file():
        return None
    return tuple(
        line.strip()
        for line in path.read_text("utf-8", errors="replace").splitlines()
        if line.strip()
    )
