"""`RemoteFolder`: a prefix of an object store.

A store has no atomic rename: files are uploaded to their final names, and a marker, written last,
completes them. Calls are repeated after a passing fault, and written bytes are compared with those
in the store, because an upload may be cut or arrive twice.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem

from utils.json_types import JsonObject
from utils.storage.folder import ASIDE, COMMIT_FILE, Folder, StorageError
from utils.storage.local import compute_crc32c
from utils.storage.retry import retry


class RemoteFolder(Folder):
    """A prefix of an object store, or any other fsspec file system."""

    def __init__(self, filesystem: AbstractFileSystem, path: str) -> None:
        self._filesystem = filesystem
        self._path = path.rstrip("/")
        self._root = str(filesystem._strip_protocol(self._path))
        self.place = filesystem.unstrip_protocol(self._path)

    @property
    def parent(self) -> RemoteFolder:
        return RemoteFolder(self._filesystem, self._path.rpartition("/")[0])

    def child(self, name: str) -> RemoteFolder:
        return RemoteFolder(self._filesystem, f"{self._path}/{name}")

    def is_there(self) -> bool:
        self._filesystem.invalidate_cache()
        return self._call("", self._filesystem.isdir, self._path)

    def list_names(self) -> list[str]:
        # fsspec's cached listings lack files that another process has written since.
        self._filesystem.invalidate_cache()
        try:
            paths = self._call("", lambda: self._filesystem.ls(self._path, detail=False))
        except (FileNotFoundError, NotADirectoryError):
            return []
        # Some stores list an empty object of the folder's own name.
        names = {str(path).rstrip("/").rpartition("/")[2] for path in paths}
        return sorted(names - {""})

    def list_once(self) -> list[str]:
        """List paths directly below without retries; raises FileNotFoundError."""
        return self._filesystem.ls(self._path, detail=False)

    def get_size(self, name: str) -> int:
        return int(self._get_info(name)["size"])

    def get_checksum(self, name: str) -> int:
        kept = self._get_info(name).get("crc32c")
        if isinstance(kept, str):
            return int.from_bytes(base64.b64decode(kept), "big")
        with self.open_local(name) as path:
            return compute_crc32c(path)

    def read_text(self, name: str) -> str:
        return self._read(name).decode(errors="replace")

    def read_bytes(self, name: str, start: int, count: int) -> bytes:
        path = f"{self._path}/{name}"
        read = self._filesystem.cat_file
        data = self._call(name, lambda: read(path, start=start, end=start + count))
        # A server without ranges answers with the whole file.
        return data if len(data) <= count else data[start : start + count]

    def read_texts(self, names: Iterable[str]) -> dict[str, str]:
        # Concurrent requests: a run store may hold thousands of runs.
        paths = {f"{self._path}/{name}": name for name in names}
        if not paths:
            return {}
        fetched = self._call("", lambda: self._filesystem.cat(list(paths), on_error="return"))
        texts = {}
        for path, data in fetched.items():
            with contextlib.suppress(FileNotFoundError):
                # A file that failed among many is read again alone.
                content = data if isinstance(data, bytes) else self._read(paths[path])
                texts[paths[path]] = content.decode(errors="replace")
        return texts

    def write_text(self, name: str, text: str) -> None:
        data = text.encode()

        def write() -> None:
            self._filesystem.pipe_file(f"{self._path}/{name}", data)
            if self._filesystem.cat_file(f"{self._path}/{name}") != data:
                raise OSError("the store has other bytes than were sent")

        self._call(name, write)

    @contextlib.contextmanager
    def open_local(self, name: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="download-") as scratch:
            target = Path(scratch) / name.rpartition("/")[2]
            self._call(name, self._fetch_file, name, target)
            yield target

    def put_file(self, source: Path, name: str) -> int:
        def put() -> int:
            # Computed in each try: the file may be replaced meanwhile.
            wanted = compute_crc32c(source)
            self._filesystem.put_file(str(source), f"{self._path}/{name}")
            self._filesystem.invalidate_cache()
            if self.get_checksum(name) != wanted:
                raise OSError("the store has other bytes than were sent")
            return wanted

        return self._call(name, put)

    def read_claim(self, name: str) -> tuple[str, str] | None:
        # Version first: with newer bytes, a later write fails instead of succeeding.
        try:
            info = self._get_info(name)
            data = self._read(name)
        except FileNotFoundError:
            return None
        # The store's own number for these bytes, or their hash.
        return data.decode(), str(info.get("generation") or hashlib.sha256(data).hexdigest())

    def write_claim(self, name: str, text: str, version: str | None) -> str | None:
        path, data = f"{self._path}/{name}", text.encode()
        try:
            if "gs" in self._filesystem.protocol:
                self._call(name, _write_generation, self._filesystem, path, data, version or "0")
            elif version is None:
                self._call(name, lambda: self._filesystem.pipe_file(path, data, mode="create"))
            else:
                # Stores without conditional writes: another host may write between these lines.
                known = self.read_claim(name)
                if known is None or known[1] != version:
                    return None
                self.write_text(name, text)
        except FileExistsError:
            pass
        # If the answer to a write was lost, its retry was refused: the stored text decides.
        claim = self.read_claim(name)
        return claim[1] if claim is not None and claim[0] == text else None

    def remove_file(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._call(name, self._filesystem.rm_file, f"{self._path}/{name}")

    def probe(self) -> None:
        name, text = f".probe-{uuid.uuid4().hex}", "written to test whether it is possible"
        path = f"{self._path}/{name}"
        self._call("", self._filesystem.pipe_file, path, text.encode())
        if self.read_text(name) != text:
            raise StorageError(f"{self.place}: other bytes were read back than were written")
        self.remove_file(name)

    def publish(self, fill: Callable[[Path], None], commit: Callable[[Folder], str]) -> None:
        if self.list_names():
            self.remove()
        try:
            with tempfile.TemporaryDirectory(prefix="upload-") as scratch:
                fill(Path(scratch))
                self._call("", lambda: self._filesystem.makedirs(self._path, exist_ok=True))
                for file in sorted(Path(scratch).iterdir()):
                    self.put_file(file, file.name)
            self._filesystem.invalidate_cache()
            self.write_text(COMMIT_FILE, commit(self))
        except BaseException:
            with contextlib.suppress(Exception):
                self.remove()
            raise

    def remove(self) -> None:
        self.remove_file(COMMIT_FILE)
        self._filesystem.invalidate_cache()
        try:
            self._call("", lambda: self._filesystem.rm(self._path, recursive=True))
        except FileNotFoundError:
            return
        except StorageError:
            # One of many keeps failing: delete each with all its retries.
            for path in self._call("", self._filesystem.find, self._path):
                self.remove_file(str(path).removeprefix(self._root).lstrip("/"))
        self._filesystem.invalidate_cache()

    def set_aside(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.write_text(ASIDE + COMMIT_FILE, self.read_text(COMMIT_FILE))
            self.remove_file(COMMIT_FILE)

    def rename(self, name: str) -> Folder:
        target = self.parent.child(name)
        self._filesystem.invalidate_cache()
        for path in self._call("", self._filesystem.find, self._path):
            below = str(path).removeprefix(self._root).lstrip("/")
            self._call(below, self._filesystem.cp_file, str(path), f"{target._path}/{below}")
        self.remove()
        return target

    def _call(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        return retry(call, *arguments, place=f"{self.place}/{name}".rstrip("/"))

    def _read(self, name: str) -> bytes:
        return self._call(name, self._filesystem.cat_file, f"{self._path}/{name}")

    def _get_info(self, name: str) -> JsonObject:
        self._filesystem.invalidate_cache()
        return self._call(name, self._filesystem.info, f"{self._path}/{name}")

    def _fetch_file(self, name: str, target: Path) -> None:
        self._filesystem.get_file(f"{self._path}/{name}", str(target))
        size = self._filesystem.size(f"{self._path}/{name}")
        if target.stat().st_size != size:
            raise OSError(f"{target.stat().st_size} of {size} bytes arrived")


def _write_generation(filesystem: Any, path: str, data: bytes, generation: str) -> None:
    """Write to Google Cloud Storage only over a generation; 0 if the file must not exist."""
    bucket, key, _ = filesystem.split_path(path)
    filesystem.call(
        "POST",
        f"{filesystem._location}/upload/storage/v1/b/{bucket}/o",
        uploadType="media",
        name=key,
        ifGenerationMatch=generation,
        data=data,
        json_out=True,
    )
