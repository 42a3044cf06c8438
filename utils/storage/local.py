"""`LocalFolder`: a directory of this machine, filled under a temporary name and renamed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from utils.storage.folder import COMMIT_FILE, Folder, choose_aside_name
from utils.storage.locks import lock_file

_WRITING, _OLD, _DELETING = ".writing_", ".old_", ".deleting_"


class LocalFolder(Folder):
    """A directory of this machine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.place = str(path)

    @property
    def parent(self) -> LocalFolder:
        return LocalFolder(self.path.parent)

    def child(self, name: str) -> LocalFolder:
        return LocalFolder(self.path / name)

    def is_there(self) -> bool:
        return self.path.is_dir()

    def list_names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.path))  # noqa: PTH208 (names, not paths)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def get_size(self, name: str) -> int:
        return (self.path / name).stat().st_size

    def get_checksum(self, name: str) -> int:
        return compute_crc32c(self.path / name)

    def read_text(self, name: str) -> str:
        return (self.path / name).read_text(encoding="utf-8", errors="replace")

    def read_bytes(self, name: str, start: int, count: int) -> bytes:
        with (self.path / name).open("rb") as file:
            file.seek(start)
            return file.read(count)

    def write_text(self, name: str, text: str) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / name, text)

    @contextlib.contextmanager
    def open_local(self, name: str) -> Iterator[Path]:
        yield self.path / name

    def put_file(self, source: Path, name: str) -> int:
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        staged = target.with_name(_WRITING + target.name)
        try:
            shutil.copyfile(source, staged)
            sync_file(staged)
            checksum = compute_crc32c(staged)
            if checksum != compute_crc32c(source):
                raise OSError(f"{target}: the disk has other bytes than were written")
            staged.replace(target)
        except BaseException:
            staged.unlink(missing_ok=True)
            raise
        return checksum

    def read_claim(self, name: str) -> tuple[str, str] | None:
        try:
            text = self.read_text(name)
        except FileNotFoundError:
            return None
        return text, hashlib.sha256(text.encode()).hexdigest()

    def write_claim(self, name: str, text: str, version: str | None) -> str | None:
        self.path.mkdir(parents=True, exist_ok=True)
        with _take_turns(self.path):
            known = self.read_claim(name)
            if (known and known[1]) != version:
                return None
            self.write_text(name, text)
        return hashlib.sha256(text.encode()).hexdigest()

    def remove_file(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def probe(self) -> None:
        path = self.path
        while not path.exists():
            path = path.parent
        if not path.is_dir():
            raise NotADirectoryError(20, f"{path} is a file")
        with tempfile.NamedTemporaryFile(dir=path, prefix=".probe-") as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())

    def publish(self, fill: Callable[[Path], None], commit: Callable[[Folder], str]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        staged = self.path.with_name(_WRITING + self.name)
        shutil.rmtree(staged, ignore_errors=True)
        try:
            staged.mkdir()
            fill(staged)
            for file in staged.iterdir():
                sync_file(file)
            text = commit(LocalFolder(staged))
            write_atomically(staged / COMMIT_FILE, text)
            self._put_in_place(staged)
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise

    def _put_in_place(self, staged: Path) -> None:
        old = self.path.with_name(_OLD + self.name)
        replaces = self.path.exists()
        if replaces:
            shutil.rmtree(old, ignore_errors=True)
            self.path.rename(old)
        try:
            staged.rename(self.path)
        except OSError:
            if replaces:
                old.rename(self.path)
            raise
        sync_directory(self.path.parent)
        shutil.rmtree(old, ignore_errors=True)

    def remove(self) -> None:
        # An interrupted deletion must not leave half the files under the right name.
        doomed = self.path.with_name(_DELETING + self.name)
        shutil.rmtree(doomed, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            self.path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def set_aside(self) -> None:
        self.rename(choose_aside_name(self.name, self.parent.list_names()))

    def rename(self, name: str) -> LocalFolder:
        target = self.path.with_name(name)
        self.path.rename(target)
        sync_directory(target.parent)
        return LocalFolder(target)

    def remove_leftovers(self) -> None:
        names = self.list_names()
        for name in names:
            replaced = name.startswith(_OLD) and name.removeprefix(_OLD) in names
            if replaced or name.startswith((_WRITING, _DELETING)):
                shutil.rmtree(self.path / name, ignore_errors=True)


@contextlib.contextmanager
def _take_turns(path: Path) -> Iterator[None]:
    """Lock a directory against other threads and programs of this machine."""
    handle = os.open(path, os.O_RDONLY)
    try:
        lock_file(handle)
        yield
    finally:
        os.close(handle)


def get_old_name(name: str) -> str:
    """Return the name of a local folder while another replaces it."""
    return _OLD + name


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a local file, all or nothing, and sync it to the disk."""
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def apply_umask(path: Path) -> None:
    """Set a file's mode by the umask: safetensors makes files private to their owner."""
    probe = path.with_name(path.name + ".mode")
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    path.chmod(mode)


def sync_file(path: Path) -> None:
    """Write a file's bytes to the disk, and drop them from the cache so that reads test it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def compute_crc32c(path: Path) -> int:
    """Compute the checksum that object stores keep, for a local file."""
    import google_crc32c

    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            checksum = google_crc32c.extend(checksum, chunk)
    return checksum
