"""Where a cache is written: a directory, or one of this machine's on its way to a bucket."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from store.record.runs import get_cache_folder
from tasks.teachers.cache.manifest import MANIFEST
from utils.errors import UserError
from utils.storage.local import LocalFolder, compute_crc32c
from utils.storage.places import check_writable, get_user_cache, open_folder


class Shelf:
    """The directory in which the tools work, and the place that gets what is finished.

    A bucket's files are written in the user's cache, sent as each is whole, and deleted there: the
    same command on this machine continues with every row, on another one with every whole file.

    Attributes:
      folder: where the cache comes to lie.
      path: the directory of this machine; of a local place the same.
    """

    def __init__(self, place: str | Path) -> None:
        text = str(place)
        if not text:
            raise UserError("--out is missing and distill.teacher_cache is empty; name a directory")
        self.folder = open_folder(text)
        self._is_local = isinstance(self.folder, LocalFolder)
        self.path = self.folder.path if self._is_local else _get_workplace(text)

    def prepare(self, names: Iterable[str] = ()) -> None:
        """Make the directory, with what the place has already of some small files.

        Args:
          names: of them, the manifest too; without it there whatever lies here is of no use.

        Raises:
          UserError: nothing can be written to the place.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if self._is_local:
            return
        check_writable(self.folder.place, "--out")
        names = list(names)
        if not names:
            return
        known = self.folder.read_texts(names)
        manifest = self.path / MANIFEST
        if not manifest.is_file() or manifest.read_text(encoding="utf-8") != known.get(MANIFEST):
            # Rows for what lay there before, or was begun elsewhere in another way.
            for path in self.path.iterdir():
                path.unlink()
        for name, text in known.items():
            (self.path / name).write_text(text, encoding="utf-8")

    def take(self, name: str, size: int) -> bool:
        """Whether a file is whole at a place elsewhere; a shorter one is fetched to go on with."""
        if self._is_local:
            return False
        there, facts = set(self.folder.list_names()), f"{name[:-4]}.json"
        if name not in there or facts not in there:
            return False
        if self.folder.get_size(name) == size:
            return True
        if not (self.path / name).exists() and not (self.path / name).with_suffix(".part").exists():
            for one in (name, facts):
                with self.folder.open_local(one) as path:
                    LocalFolder(self.path).put_file(path, one)
        return False

    def send(self, names: Iterable[str], *, keep: bool = True) -> None:
        """Bring finished files to the place, each compared with what has arrived.

        Args:
          keep: also here.
        """
        if self._is_local:
            return
        for name in names:
            path = self.path / name
            if path.is_file():
                self.folder.put_file(path, name)
                if not keep:
                    path.unlink()

    def send_all(self) -> None:
        """Bring over whatever is finished, the manifest last; what is there already stays."""
        if self._is_local:
            return
        there = set(self.folder.list_names())
        names = sorted(path.name for path in self.path.iterdir() if _is_finished(path))
        names.sort(key=lambda name: name == MANIFEST)
        for name in names:
            path = self.path / name
            if name not in there or self.folder.get_checksum(name) != compute_crc32c(path):
                self.folder.put_file(path, name)
        for name in names:
            (self.path / name).unlink()


def _is_finished(path: Path) -> bool:
    return path.is_file() and path.suffix in (".bin", ".json", ".md")


def _get_workplace(place: str) -> Path:
    return get_cache_folder(place, str(get_user_cache("trainer", "answers")))
