"""Index of an uncompressed tar of examples in the WebDataset layout.

Consecutive members that share their name up to the first dot of the file's name are one example:
`cat/0001.jpg` and `cat/0001.cls` are the image and the label of `cat/0001`.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from big_vision.input.images.folder import is_hidden
from big_vision.input.index_cache import Arrays
from utils.errors import UserError

_BLOCK_BYTES = 512
_FORGET_MEMBERS = 1000


@dataclass(frozen=True)
class MemberKeys:
    """Which members of an example are its image and its label."""

    images: tuple[str, ...]  # endings of files, without the first dot
    label: str  # the ending of the label's file
    # the label's position in a file of JSON; empty if the file is the label
    path: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{';'.join(self.images)} {'/'.join((self.label, *self.path))}"


class _Member(NamedTuple):
    example: str
    ending: str
    offset: int
    size: int


@dataclass
class _Index:
    names: list[str] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    endings: set[str] = field(default_factory=set)
    without_image: int = 0
    hidden: int = 0

    def add(self, members: dict[str, _Member], keys: MemberKeys, label: str) -> None:
        """Add one example; one without an image is only counted."""
        image = next((members[ending] for ending in keys.images if ending in members), None)
        self.endings.update(members)
        if image is None:
            self.without_image += 1
            return
        self.names.append(image.example)
        self.offsets.append(image.offset)
        self.sizes.append(image.size)
        self.labels.append(label)

    def get_arrays(self) -> Arrays:
        """Return the arrays as cached; bytes need no pickle and a quarter of text's memory."""
        # A member's name that is not UTF-8 keeps its readable characters.
        texts = [n.encode(errors="surrogateescape").decode(errors="replace") for n in self.names]
        return {
            "names": np.array([text.encode() for text in texts], np.bytes_),
            "offsets": np.array(self.offsets, np.int64),
            "sizes": np.array(self.sizes, np.int64),
            "labels": np.array([label.encode() for label in self.labels], np.bytes_),
            "endings": np.array(sorted(self.endings), np.str_),
            "without_image": np.array(self.without_image, np.int64),
            "hidden": np.array(self.hidden, np.int64),
        }


def scan_tar(path: Path, keys: MemberKeys) -> Arrays:
    """Return names, offsets, sizes and labels of a tar's examples.

    Returns:
      `names`, `labels` [n] bytes, `offsets`, `sizes` [n] int64 of the encoded images; a missing
      label is empty; `endings`: of all files; `without_image`: examples left out; `hidden`: files
      left out, whose name or folder begins with a dot.

    Raises:
      UserError: it is not a tar, truncated, or has an unreadable label.
    """
    index = _Index()
    try:
        with tarfile.open(path, "r:") as tar:
            members: dict[str, _Member] = {}
            for member in _list_members(tar, path):
                if _is_hidden(member):
                    index.hidden += 1
                    continue
                if members and member.example != next(iter(members.values())).example:
                    index.add(members, keys, _read_label(tar, path, members, keys))
                    members = {}
                members.setdefault(member.ending, member)
            if members:
                index.add(members, keys, _read_label(tar, path, members, keys))
    except tarfile.ReadError as error:
        reason = "is cut short" if "unexpected end" in str(error) else "is no uncompressed tar"
        raise UserError(f"data.root: {path} {reason} ({error}); copy or write it again") from error
    return index.get_arrays()


def _list_members(tar: tarfile.TarFile, path: Path) -> Iterator[_Member]:
    """Yield the files of a tar in order; a tar without its end is an error."""
    size = path.stat().st_size
    last = "its beginning"
    listed: Any = tar  # its type leaves `members` out
    while (info := tar.next()) is not None:
        # Otherwise the list would hold every member of the tar while it is open.
        if len(listed.members) > _FORGET_MEMBERS:
            listed.members.clear()
        if not info.isreg() or info.issparse():
            continue
        if info.offset_data + info.size > size:
            raise tarfile.ReadError(f"unexpected end of data within {info.name}")
        last = info.name
        folder, slash, name = info.name.rpartition("/")
        stem, _, ending = name.partition(".")
        yield _Member(folder + slash + stem, ending.lower(), info.offset_data, info.size)
    tar.fileobj.seek(tar.offset)
    block = tar.fileobj.read(_BLOCK_BYTES)
    if len(block) < _BLOCK_BYTES or any(block):
        raise tarfile.ReadError(f"unexpected end of data after {last}")


def _is_hidden(member: _Member) -> bool:
    """Return whether the file or a folder of it begins with a dot, as macOS's `._0001.jpg`."""
    *folders, stem = member.example.split("/")
    return not stem or any(is_hidden(name) for name in folders if name not in (".", ".."))


def _read_label(
    tar: tarfile.TarFile, path: Path, members: dict[str, _Member], keys: MemberKeys
) -> str:
    """Return the text of an example's label; empty if it has none."""
    member = members.get(keys.label)
    if member is None:
        return ""
    position = tar.fileobj.tell()
    tar.fileobj.seek(member.offset)
    text = tar.fileobj.read(member.size).decode("utf-8", errors="replace").strip()
    tar.fileobj.seek(position)
    if not keys.path:
        return text
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UserError(
            f"data.label_key: {path}, {member.example}.{member.ending} is not JSON ({error}); "
            "correct it or name another file's ending"
        ) from error
    for name in keys.path:
        value = value.get(name) if isinstance(value, dict) else None
    return "" if value is None else str(value)
