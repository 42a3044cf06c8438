"""`RunSession`: one program's time with a run, from taking it to letting it go."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from store.record.artifacts import publish_artifacts
from store.record.attempts import begin_attempt, end_attempt, format_utc
from store.record.environment import ENVIRONMENT_FILE, write_environment
from store.record.lock import RunLock
from store.record.mirror import Mirror, pull
from store.record.runs import Run, begin, check_free, find_leftovers, has_facts, set_aside
from store.record.source import DIFF_FILE, read_source
from store.record.summary import SUMMARY_FILE, withdraw_summary, write_summary
from utils.json_types import JsonObject
from utils.log import get_logger
from utils.storage.folder import Folder
from utils.storage.places import open_folder

# What a bill depends on.
_HARDWARE = ("device", "hardware", "chip", "devices", "world_size", "cores")


class RunSession:
    """Held by the rank that writes. Nothing is looked at before the lock is held.

    Attributes:
      attempt: this program's number among those that have worked on the run; 0 before `begin`.
      mirror: carries lines and facts to the run's bucket; none where it has none.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.attempt = 0
        self.mirror: Mirror | None = None
        self._lock = RunLock(run.path, run.remote)
        self._aside: list[Folder] = []
        self._made: list[Path] = []  # directories that were not there, the deepest first

    @property
    def is_lost(self) -> bool:
        """Whether another machine has taken the run over."""
        return self._lock.is_lost

    def take_new(self, *, overwrite: bool) -> None:
        """Take the place of a new run; a run that may be replaced is set aside.

        Raises:
          UserError: the place is taken, or another program has it.
        """
        folders = (self.run.path, *self.run.path.parents)
        self._made = [folder for folder in folders if not folder.exists()]
        self._lock.acquire()
        check_free(self.run, overwrite=overwrite)
        leftovers = find_leftovers(self.run)
        if not leftovers:
            return
        old = self._lock
        old.release_claim()  # it is moved with the rest; the lock on the disk is kept meanwhile
        self._aside = [set_aside(folder) for folder in leftovers]
        self._lock = RunLock(self.run.path, self.run.remote)
        self._lock.acquire()
        old.release()
        check_free(self.run, overwrite=False)

    def take_old(self) -> None:
        """Take a run that goes on, and bring from its bucket what this machine lacks.

        Raises:
          UserError: another program has it.
        """
        self._lock.acquire()
        if self.run.remote and has_facts(open_folder(self.run.remote)):
            pull(self.run.path, self.run.remote)

    def begin(
        self, config_text: str, facts: JsonObject, *, from_step: int, newest_id: str = ""
    ) -> None:
        """Write what is known at the start, once everything has been built.

        Args:
          from_step: steps done before this attempt.
          newest_id: of the experiment's runs; a new run sorts behind it.

        Raises:
          OSError: the disk or the store refuses; of a new run nothing is left on the disk.
        """
        try:
            self._write_first(config_text, facts, from_step, newest_id)
        except OSError:
            self._forget()
            raise

    def _write_first(
        self, config_text: str, facts: JsonObject, from_step: int, newest_id: str
    ) -> None:
        withdraw_summary(self.run.path, self.run.remote)
        begin(self.run, config_text, facts, newest_id=newest_id)
        environment, source = facts.get("environment", {}), read_source()
        hardware = {k: v for k, v in environment.items() if k in _HARDWARE}
        self.attempt = begin_attempt(self.run.path, from_step, hardware, source.name)
        write_environment(self.run.path, environment, source, self.attempt)
        self.run.update(status="running", attempts=self.attempt, final_up_to_step=from_step)
        if self.run.remote:
            self._send_once(ENVIRONMENT_FILE, DIFF_FILE)
            self.mirror = Mirror(self.run.path, self.run.remote, self.attempt, from_step=from_step)

    def note_checkpoint(self, step: int) -> None:
        """A checkpoint stands whole: what came before it will not be done again."""
        self.run.update(final_up_to_step=step)
        while self._aside:
            # The new run stands on its own feet; only now the one that it replaces may go.
            self._aside.pop().remove()

    def complete(self, step: int, final: JsonObject, reason: str) -> None:
        """Note a run's end, after all that it leaves behind has been sent and checked.

        Raises:
          OSError: the disk or the store refuses.
        """
        if self.mirror is not None:
            self.mirror.flush()
        artifacts = publish_artifacts(self.run.path, self.run.remote)
        end_attempt(self.run.path, self.attempt, step, "complete")
        facts = {"reason": reason, **_get_end(), "final": final, "summary": SUMMARY_FILE}
        self.run.update(status="complete", **facts)
        write_summary(self.run.path, artifacts, self.run.remote)

    def end(self, step: int, status: str, reason: str) -> None:
        """Note that the attempt has ended another way; a disk that refuses is said, not raised."""
        if not self.attempt or not self.run.path.is_dir():
            return
        try:
            withdraw_summary(self.run.path, self.run.remote)
            end_attempt(self.run.path, self.attempt, step, status, reason)
            self.run.update(status=status, reason=reason, **_get_end())
        except OSError as error:
            get_logger().error("%s: the run's end could not be noted: %s", self.run.place, error)

    def close(self) -> None:
        """Send the rest and let go of the run."""
        if self.mirror is not None and not self.is_lost:
            self.mirror.close()
        if not self.attempt and self._made:
            # What never began leaves nothing behind.
            self._lock.remove()
            with contextlib.suppress(OSError):
                for folder in self._made:
                    folder.rmdir()
        self._lock.release()

    def _forget(self) -> None:
        """Take away what has been written of a run whose directory this program has made."""
        self.attempt = 0
        if self.run.path in self._made:
            with contextlib.suppress(OSError):
                for file in self.run.path.iterdir():
                    file.unlink()

    def _send_once(self, *names: str) -> None:
        """Have files on the bucket as they are here, or as little there as here."""
        target = open_folder(self.run.remote)
        for name in names:
            if (self.run.path / name).is_file():
                target.put_file(self.run.path / name, name)
            else:
                target.remove_file(name)


def _get_end() -> JsonObject:
    """When a run ended: seconds since 1970, and for people."""
    now = time.time()
    return {"ended": now, "ended_utc": format_utc(now)}
