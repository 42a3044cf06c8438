"""A lock that names its owner: one program at a time writes to a run's directory."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import IO

from store.record.claim import Claim, describe_self, explain, name_owner
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.log import get_logger
from utils.storage.locks import try_lock

LOCK_FILE = "run.lock"
_BEAT_S = 20.0
# An owner on another host counts as dead after this silence: six beats.
_PATIENCE_S = 120.0
# Time that an owner may take to end.
_WAIT_S = 10.0


class RunLock:
    """Held for as long as a program writes to a run's directory.

    The kernel releases the lock however its owner dies. If two hosts share a directory but no
    locks, an owner on the other host is alive while its beats renew the file's time. A run on a
    bucket is claimed there too, for machines that share nothing else.

    Args:
      folder: the run's local directory.
      remote: its URL on a bucket; empty without one.
    """

    def __init__(self, folder: Path, remote: str = "") -> None:
        self.path = folder / LOCK_FILE
        self._claim = Claim(remote) if remote else None
        self._file: IO[str] | None = None
        self._stop = threading.Event()

    def acquire(self, wait_s: float = _WAIT_S) -> None:
        """Acquire the lock; UserError names an owner that is still alive after `wait_s`."""
        file = self._open()
        try:
            deadline = time.monotonic() + wait_s
            self._wait_for(file, deadline)
            while not _is_at(file, self.path):
                # The previous owner has renamed or removed the run: `file` is now elsewhere.
                file.close()
                file = self._open()
                self._wait_for(file, deadline)
            owner = _read_owner(file)
            if _may_be_alive_elsewhere(owner, self.path):
                raise UserError(explain(self.path.parent, owner), code="run.busy")
            if self._claim is not None:
                self._claim.acquire(wait_s)
            if owner:
                get_logger().info("took over the run from %s", name_owner(owner))
            file.seek(0)
            file.truncate(0)
            file.write(json.dumps(describe_self()))
            file.flush()
        except BaseException:
            file.close()
            raise
        self._file = file
        threading.Thread(target=self._beat, name="run-lock", daemon=True).start()

    @property
    def is_lost(self) -> bool:
        """Whether another machine has taken over the run after this one's silence."""
        return self._claim is not None and self._claim.lost

    def release(self) -> None:
        """Release the run."""
        self._stop.set()
        self.release_claim()
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.truncate(0)
            self._file.close()
            self._file = None

    def remove(self) -> None:
        """Delete the file while it is held; a program that waits for it opens a new one."""
        if self._file is not None:
            self.path.unlink(missing_ok=True)

    def release_claim(self) -> None:
        """Release only the run's claim on its bucket."""
        if self._claim is not None:
            self._claim.release()

    def _open(self) -> IO[str]:
        folder = self.path.parent
        while True:
            # Another program may rename the directory between the two calls, or during the first,
            # which then fails with FileExistsError although nothing exists there any more.
            try:
                folder.mkdir(parents=True, exist_ok=True)
                return self.path.open("a+", encoding="utf-8")
            except FileNotFoundError:
                continue
            except FileExistsError:
                if folder.is_symlink() or folder.is_file():
                    raise

    def _wait_for(self, file: IO[str], deadline: float) -> None:
        announced = False
        while not _try_lock(file):
            if time.monotonic() >= deadline:
                raise UserError(explain(self.path.parent, _read_owner(file)), code="run.busy")
            if not announced:
                get_logger().warning("waiting for %s to end", name_owner(_read_owner(file)))
                announced = True
            time.sleep(0.2)

    def _beat(self) -> None:
        while not self._stop.wait(_BEAT_S):
            with contextlib.suppress(OSError):
                os.utime(self.path)


def find_owner(folder: Path) -> JsonObject:
    """Return the program that holds a run now; empty if none does. Changes nothing."""
    path = folder / LOCK_FILE
    try:
        with path.open("r", encoding="utf-8") as file:
            owner = _read_owner(file)
            if not _try_lock(file):
                return owner or {"pid": "unknown"}
    except OSError:
        return {}
    return owner if _may_be_alive_elsewhere(owner, path) else {}


def refuse_if_owned(folder: Path, wait_s: float = _WAIT_S) -> None:
    """Refuse a run that another program still writes after `wait_s`; UserError names it."""
    deadline = time.monotonic() + wait_s
    while owner := find_owner(folder):
        if time.monotonic() >= deadline:
            raise UserError(explain(folder, owner), code="run.busy")
        time.sleep(0.2)


def _try_lock(file: IO[str]) -> bool:
    try:
        return try_lock(file)
    except OSError:
        return True  # a file system without locks: the beat decides


def _read_owner(file: IO[str]) -> JsonObject:
    file.seek(0)
    try:
        owner = json.loads(file.read())
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _is_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _may_be_alive_elsewhere(owner: JsonObject, path: Path) -> bool:
    """Return whether an owner whose lock is not visible here may still run."""
    if not owner or owner.get("host") == socket.gethostname():
        return False
    try:
        silent_s = time.time() - path.stat().st_mtime
    except OSError:
        return False
    # A beat from the future: a clock was set back, which is no sign of the owner's death.
    return silent_s < _PATIENCE_S
