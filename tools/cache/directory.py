"""`CacheDirectory`: a local directory, which may be uploaded to a bucket file by file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from store.record.runs import get_cache_folder
from tasks.teachers.cache.manifest import MANIFEST
from tools.cache.card import get_facts_name
from utils.errors import UserError
from utils.storage.folder import Folder
from utils.storage.local import LocalFolder, compute_crc32c
from utils.storage.places import check_writable, get_user_cache, open_folder


class CacheDirectory:
    """The local directory in which a cache is written, and its destination.

    Files of a bucket are written in the user's cache, uploaded when they are whole, and deleted
    there: on this machine the same command continues with every row, on another with whole files.

    Attributes:
      folder: destination of the cache.
      path: the local directory, equal to a local destination.
    """

    def __init__(self, destination: str | Path) -> None:
        text = str(destination)
        if not text:
            raise UserError("--out is missing and distill.teacher_cache is empty; name a directory")
        self.folder = open_folder(text)
        self._is_local = isinstance(self.folder, LocalFolder)
        if isinstance(self.folder, LocalFolder):
            self.path = self.folder.path
        else:
            cache = get_user_cache("answers", former="trainer/answers")
            self.path = get_cache_folder(text, str(cache))

    def prepare(self, names: Iterable[str] = ()) -> None:
        """Create the directory, with the destination's copies of some small files.

        Args:
          names: of them, with the manifest; if that differs, local files are deleted.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if self._is_local:
            return
        check_writable(self.folder.place, "--out")
        names = list(names)
        if not names:
            return
        texts = self.folder.read_texts(names)
        manifest = self.path / MANIFEST
        if not manifest.is_file() or manifest.read_text(encoding="utf-8") != texts.get(MANIFEST):
            # Rows of an earlier cache, or of one that was begun elsewhere in another way.
            for path in self.path.iterdir():
                path.unlink()
        for name, text in texts.items():
            (self.path / name).write_text(text, encoding="utf-8")

    def take(self, name: str, size: int) -> bool:
        """Return whether the bucket has a file whole; a shorter one is fetched to continue it."""
        if self._is_local:
            return False
        existing, pair = set(self.folder.list_names()), (name, get_facts_name(name))
        if not existing.issuperset(pair):
            return False
        if self.folder.get_size(name) == size:
            return True
        if not (self.path / name).exists() and not (self.path / name).with_suffix(".part").exists():
            copy_files(self.folder, pair, self.path)
        return False

    def send(self, names: Iterable[str], *, keep: bool = True) -> None:
        """Upload finished files, and compare their checksums.

        Args:
          keep: the local ones, too.
        """
        if self._is_local:
            return
        for path in (self.path / name for name in names):
            if path.is_file():
                self.folder.put_file(path, path.name)
                if not keep:
                    path.unlink()

    def send_all(self) -> None:
        """Upload and delete all finished local files, the manifest last; equal ones are kept."""
        if self._is_local:
            return
        existing = set(self.folder.list_names())
        paths = [path for path in self.path.iterdir() if path.is_file()]
        paths = [path for path in paths if path.suffix in (".bin", ".json", ".md")]
        paths.sort(key=lambda path: (path.name == MANIFEST, path.name))
        for path in paths:
            name = path.name
            if name not in existing or self.folder.get_checksum(name) != compute_crc32c(path):
                self.folder.put_file(path, name)
        for path in paths:
            path.unlink()


def copy_files(source: Folder, names: Iterable[str], target: Path) -> None:
    """Copy files of a folder to a local directory, each whole or not at all."""
    for name in names:
        with source.open_local(name) as path:
            LocalFolder(target).put_file(path, name)
