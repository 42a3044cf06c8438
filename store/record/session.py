"""`RunSession`: one program's work on a run, from acquiring to releasing it."""

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

# Fields of the environment that affect the cost of an attempt.
_HARDWARE = ("device", "hardware", "chip", "devices", "world_size", "cores")


class RunSession:
    """A run held by one program, in its writing rank; `attempt` is 0 before `begin`."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.attempt = 0
        self.mirror: Mirror | None = None
        self._lock = RunLock(run.path, run.remote)
        self._aside: list[Folder] = []
        self._made: list[Path] = []  # directories that did not exist, the deepest first

    @property
    def is_lost(self) -> bool:
        """Whether another machine has taken over the run."""
        return self._lock.is_lost

    def take_new(self, *, overwrite: bool) -> None:
        """Acquire a new run; a run of its name is set aside if it may be replaced."""
        folders = (self.run.path, *self.run.path.parents)
        self._made = [folder for folder in folders if not folder.exists()]
        self._lock.acquire()
        check_free(self.run, overwrite=overwrite)
        leftovers = find_leftovers(self.run)
        if not leftovers:
            return
        old = self._lock
        old.release_claim()  # the claim is renamed with the run; the local lock stays held
        self._aside = [set_aside(folder) for folder in leftovers]
        self._lock = RunLock(self.run.path, self.run.remote)
        self._lock.acquire()
        old.release()
        check_free(self.run, overwrite=False)

    def take_old(self) -> None:
        """Acquire a run to resume, and download from its bucket what this machine lacks."""
        self._lock.acquire()
        if self.run.remote and has_facts(open_folder(self.run.remote)):
            pull(self.run.path, self.run.remote)

    def begin(
        self, config_text: str, facts: JsonObject, *, from_step: int, newest_id: str = ""
    ) -> None:
        """Record the start; if that fails with an OSError, a new run's files are deleted."""
        try:
            withdraw_summary(self.run.path, self.run.remote)
            begin(self.run, config_text, facts, newest_id=newest_id)
            environment, source = facts.get("environment", {}), read_source()
            hardware = {k: v for k, v in environment.items() if k in _HARDWARE}
            self.attempt = begin_attempt(self.run.path, from_step, hardware, source.name)
            write_environment(self.run.path, environment, source, self.attempt)
            self.run.update(status="running", attempts=self.attempt, final_up_to_step=from_step)
            if self.run.remote:
                self._upload(ENVIRONMENT_FILE, DIFF_FILE)
                self.mirror = Mirror(
                    self.run.path, self.run.remote, self.attempt, from_step=from_step
                )
        except OSError:
            self.attempt = 0
            if self.run.path in self._made:
                with contextlib.suppress(OSError):
                    for file in self.run.path.iterdir():
                        file.unlink()
            raise

    def note_checkpoint(self, step: int) -> None:
        """Record that a checkpoint is complete: earlier steps will not be repeated."""
        self.run.update(final_up_to_step=step)
        while self._aside:
            # The replaced run is deleted only now, when the new one can be resumed.
            self._aside.pop().remove()

    def complete(self, step: int, final: JsonObject, reason: str) -> None:
        """Record a run's end, after all its files have been uploaded and checked."""
        if self.mirror is not None:
            self.mirror.flush()
        artifacts = publish_artifacts(self.run.path, self.run.remote)
        end_attempt(self.run.path, self.attempt, step, "complete")
        facts = {"reason": reason, **_get_end(), "final": final, "summary": SUMMARY_FILE}
        self.run.update(status="complete", **facts)
        write_summary(self.run.path, artifacts, self.run.remote)

    def end(self, step: int, status: str, reason: str) -> None:
        """Record an end other than completion; an error of the disk is logged, not raised."""
        if not self.attempt or not self.run.path.is_dir():
            return
        try:
            withdraw_summary(self.run.path, self.run.remote)
            end_attempt(self.run.path, self.attempt, step, status, reason)
            self.run.update(status=status, reason=reason, **_get_end())
        except OSError as error:
            get_logger().error("%s: the run's end could not be recorded: %s", self.run.place, error)

    def close(self) -> None:
        """Upload the rest and release the run."""
        if self.mirror is not None and not self.is_lost:
            self.mirror.close()
        if not self.attempt and self._made:
            # A run that never began leaves nothing behind.
            self._lock.remove()
            with contextlib.suppress(OSError):
                for folder in self._made:
                    folder.rmdir()
        self._lock.release()

    def _upload(self, *names: str) -> None:
        """Upload files, and delete those that do not exist here."""
        target = open_folder(self.run.remote)
        for name in names:
            if (self.run.path / name).is_file():
                target.put_file(self.run.path / name, name)
            else:
                target.remove_file(name)


def _get_end() -> JsonObject:
    """Return the time of an end: seconds since 1970, and for people."""
    now = time.time()
    return {"ended": now, "ended_utc": format_utc(now)}
