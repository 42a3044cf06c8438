"""The lock of a run for machines that share only a bucket: one small object that names the owner.

No clocks are compared: an owner rewrites it at each beat, and is dead if it stays the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from pathlib import Path

import psutil

from utils.errors import UserError
from utils.json_types import JsonObject
from utils.log import get_logger
from utils.storage.folder import Folder
from utils.storage.places import open_folder

CLAIM_FILE = "run.lock"
_BEAT_S = 20.0
# An owner is dead after this silence: three beats and the time of one write.
_PATIENCE_S = 75.0


class Claim:
    """The lock on a bucket, renewed by beats; `lost` once another program has taken it over."""

    def __init__(self, url: str, beat_s: float = _BEAT_S, patience_s: float = _PATIENCE_S) -> None:
        self.url, self.lost = url, False
        self._beat_s, self._patience_s = beat_s, patience_s
        self._token, self._beats = uuid.uuid4().hex, 0
        self._version: str | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, wait_s: float) -> None:
        """Acquire the run once its owner has ended or counts as dead; UserError if it is alive."""
        folder = open_folder(self.url)
        began = time.monotonic()
        seen, since, announced = None, began, False
        while True:
            known = folder.read_claim(CLAIM_FILE)
            owner, version = _parse(known), known and known[1]
            if version != seen:
                has_beaten = seen is not None and bool(owner)
                seen, since = version, time.monotonic()
                if has_beaten and since - began >= wait_s:
                    raise UserError(explain(self.url, owner), code="run.busy")
            is_dead = is_of_this_machine(owner) and not is_running(owner)
            if not owner or is_dead or time.monotonic() - since >= self._patience_s:
                if self._write(folder, version):
                    break
                continue
            if is_of_this_machine(owner) and time.monotonic() - began >= wait_s:
                raise UserError(explain(self.url, owner), code="run.busy")
            if not announced:
                get_logger().warning(
                    "waiting to see whether %s is alive, up to %.0f s",
                    name_owner(owner),
                    self._patience_s,
                )
                announced = True
            time.sleep(min(1.0, self._beat_s / 4))
        if owner:
            get_logger().info("took over the run from %s", name_owner(owner))
        self._thread = threading.Thread(target=self._run, name="run-claim", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Release the run if it is held."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        self._thread = None
        if not self.lost:
            with contextlib.suppress(OSError):
                open_folder(self.url).write_claim(CLAIM_FILE, "{}", self._version)

    def _write(self, folder: Folder, version: str | None) -> bool:
        self._beats += 1
        text = json.dumps({**describe_self(), "token": self._token, "beat": self._beats})
        written = folder.write_claim(CLAIM_FILE, text, version)
        if written is None:
            return False
        self._version = written
        return True

    def _run(self) -> None:
        folder = open_folder(self.url)
        while not self._stop.wait(self._beat_s):
            try:
                held = self._write(folder, self._version)
            except OSError as error:
                get_logger().warning("the run's lock could not be renewed yet: %s", error)
                continue
            if not held:
                self.lost = True
                return


def _parse(known: tuple[str, str] | None) -> JsonObject:
    try:
        owner = json.loads(known[0]) if known is not None else {}
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def name_owner(owner: JsonObject) -> str:
    """Describe process, host and start."""
    started = owner.get("started")
    since = ""
    if isinstance(started, int | float):
        since = time.strftime(", started %Y-%m-%d %H:%M:%S", time.localtime(started))
    return f"process {owner.get('pid', '?')} on {owner.get('host', 'an unknown host')}{since}"


def explain(place: str | Path, owner: JsonObject) -> str:
    """Return the error message for a run that another program is writing."""
    return (
        f"run.run_id: {place} is being written by {name_owner(owner)}; wait for it, stop it, or "
        "choose another run.run_id"
    )


def describe_self() -> JsonObject:
    """Describe this program for a lock."""
    return {
        "host": socket.gethostname(),
        "machine": _get_machine(),
        "pid": os.getpid(),
        "started": time.time(),
    }


def is_of_this_machine(owner: JsonObject) -> bool:
    """Return whether an owner's process number is valid here: same boot, same container."""
    return bool(owner) and owner.get("machine") == _get_machine()


def is_running(owner: JsonObject) -> bool:
    """Return whether an owner of this machine still runs."""
    try:
        # A process that began after the owner wrote its name has reused its number.
        return psutil.Process(owner["pid"]).create_time() <= owner["started"] + 1.0
    except (psutil.Error, KeyError, TypeError, ValueError):
        return False


def _get_machine() -> str:
    """Return an id of this boot of a machine or container: host names are not unique."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()
