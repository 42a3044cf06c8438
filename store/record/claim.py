"""The lock of a run that two machines share: one small object, written conditionally.

No clocks are compared: an owner is dead if its beat does not change during an observation.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid

from store.record.owner import describe_self, explain, is_of_this_machine, is_running, name_owner
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
    """Held by beats: an owner that is silent for too long loses the run to one that waits.

    Attributes:
      lost: whether another program has taken over after this one's silence.
    """

    def __init__(self, url: str, beat_s: float = _BEAT_S, patience_s: float = _PATIENCE_S) -> None:
        self.url, self.lost = url, False
        self._beat_s, self._patience_s = beat_s, patience_s
        self._token, self._beats = uuid.uuid4().hex, 0
        self._version: str | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, wait_s: float) -> None:
        """Acquire the run; wait for an owner that is ending, or until it counts as dead.

        Raises:
          UserError: another program has the run; names it.
          StorageError: the bucket cannot be read or written.
        """
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
                    raise UserError(explain(self.url, owner))
            if self._is_free(owner, silent_s=time.monotonic() - since):
                if self._write(folder, version):
                    break
                continue
            if is_of_this_machine(owner) and time.monotonic() - began >= wait_s:
                raise UserError(explain(self.url, owner))
            if not announced:
                get_logger().warning(
                    "waiting to see whether %s is alive, up to %.0f s",
                    name_owner(owner), self._patience_s,
                )  # fmt: skip
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
            return
        self._stop.set()
        self._thread.join()
        self._thread = None
        if not self.lost:
            with contextlib.suppress(OSError):
                open_folder(self.url).write_claim(CLAIM_FILE, "{}", self._version)

    def _is_free(self, owner: JsonObject, silent_s: float) -> bool:
        if not owner or silent_s >= self._patience_s:
            return True
        return is_of_this_machine(owner) and not is_running(owner)

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
