"""One program at a time on a run's directory: a lock that names its owner."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import IO

from store.record.claim import Claim
from store.record.owner import describe_self, explain, name_owner
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.log import get_logger
from utils.storage.locks import try_lock

LOCK_FILE = "run.lock"
_BEAT_S = 20.0
# Beats that an owner on another host may miss before it is taken for dead.
_PATIENCE_S = 120.0
# How long an owner that is just being ended may take.
_WAIT_S = 10.0


class RunLock:
    """Held for as long as a program writes to a run's directory.

    The kernel holds the lock and lets go of it when the owner dies, however it dies. Where two
    hosts share a directory without sharing locks, the owner's beat in the file's time decides. A
    run on a bucket is claimed there too, for two machines that share nothing else.

    Args:
      folder: the run's local directory.
      remote: its place on a bucket; empty: it has none.
    """

    def __init__(self, folder: Path, remote: str = "") -> None:
        self.path = folder / LOCK_FILE
        self._claim = Claim(remote) if remote else None
        self._file: IO[str] | None = None
        self._stop = threading.Event()

    def acquire(self, wait_s: float = _WAIT_S) -> None:
        """Take the lock; one whose owner is dead is taken over.

        Args:
          wait_s: how long to wait for an owner that is alive.

        Raises:
          UserError: another program has the run; names it.
        """
        file = self._open()
        try:
            deadline = time.monotonic() + wait_s
            self._wait_for(file, deadline)
            while not self._is_in_place(file):
                # Its owner has renamed or removed the run: the lock is that of another place.
                file.close()
                file = self._open()
                self._wait_for(file, deadline)
            owner = _read_owner(file)
            if _may_be_alive_elsewhere(owner, self.path):
                raise UserError(explain(self.path.parent, owner))
            if self._claim is not None:
                self._claim.acquire(wait_s)
            if owner:
                get_logger().info("took over the run from %s", name_owner(owner))
            _write_owner(file)
        except BaseException:
            file.close()
            raise
        self._file = file
        beat = threading.Thread(target=self._beat, name="run-lock", daemon=True)
        beat.start()

    @property
    def is_lost(self) -> bool:
        """Whether another machine has taken the run over, after this one had been silent."""
        return self._claim is not None and self._claim.lost

    def release(self) -> None:
        """Let go of the run."""
        self._stop.set()
        self.release_claim()
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.truncate(0)
            self._file.close()
            self._file = None

    def remove(self) -> None:
        """Take the file away while it is held; who waits for it looks again."""
        if self._file is not None:
            self.path.unlink(missing_ok=True)

    def release_claim(self) -> None:
        """Let go of the run on its bucket alone."""
        if self._claim is not None:
            self._claim.release()

    def _open(self) -> IO[str]:
        folder = self.path.parent
        while True:
            # The directory's owner may rename it between the two calls, or within the first one,
            # which then finds a name that exists and is no directory.
            try:
                folder.mkdir(parents=True, exist_ok=True)
                return self.path.open("a+", encoding="utf-8")
            except FileNotFoundError:
                continue
            except FileExistsError:
                if folder.is_symlink() or folder.is_file():
                    raise

    def _is_in_place(self, file: IO[str]) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), self.path.stat())
        except FileNotFoundError:
            return False

    def _wait_for(self, file: IO[str], deadline: float) -> None:
        announced = False
        while not _try_lock(file):
            if time.monotonic() >= deadline:
                raise UserError(explain(self.path.parent, _read_owner(file)))
            if not announced:
                get_logger().warning("waiting for %s to end", name_owner(_read_owner(file)))
                announced = True
            time.sleep(0.2)

    def _beat(self) -> None:
        while not self._stop.wait(_BEAT_S):
            with contextlib.suppress(OSError):
                os.utime(self.path)


def find_owner(folder: Path) -> JsonObject:
    """The program that has a run right now; empty if none has. Changes nothing."""
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
    """Refuse a run that another program writes to.

    Args:
      wait_s: how long to wait for an owner that is just being ended.

    Raises:
      UserError: names host, process and start.
    """
    deadline = time.monotonic() + wait_s
    while owner := find_owner(folder):
        if time.monotonic() >= deadline:
            raise UserError(explain(folder, owner))
        time.sleep(0.2)


def _try_lock(file: IO[str]) -> bool:
    try:
        return try_lock(file)
    except OSError:
        return True  # a file system without locks: the beat alone decides


def _read_owner(file: IO[str]) -> JsonObject:
    file.seek(0)
    try:
        owner = json.loads(file.read())
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _write_owner(file: IO[str]) -> None:
    file.seek(0)
    file.truncate(0)
    file.write(json.dumps(describe_self()))
    file.flush()


def _may_be_alive_elsewhere(owner: JsonObject, path: Path) -> bool:
    """Whether an owner whose lock this host does not see may still be at work."""
    if not owner or owner.get("host") == socket.gethostname():
        return False
    try:
        silent_s = time.time() - path.stat().st_mtime
    except OSError:
        return False
    # A beat from the future: a clock has gone back, and so tells nothing of the owner's death.
    return silent_s < _PATIENCE_S
