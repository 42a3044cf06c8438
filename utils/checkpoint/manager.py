"""`CheckpointManager`: writes the checkpoints of one run in a thread, and deletes old ones."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from utils.checkpoint.files import CheckpointError, Location, Tensors, write_checkpoint
from utils.checkpoint.find import get_folder_name, list_steps, read_best_step
from utils.json_types import JsonMapping
from utils.log import get_logger
from utils.storage.folder import COMMIT_FILE, Folder
from utils.storage.local import LocalFolder
from utils.storage.places import open_folder

BEST_FILE = "best.json"


@dataclass
class _Write:
    """One checkpoint that is being written."""

    step: int
    parts: Tensors
    facts: JsonMapping
    best: bool
    before: Callable[[], None] | None  # writes files that the checkpoint relies on


class CheckpointManager:
    """Saves the checkpoints of one run in a thread, one at a time.

    An error of the thread is raised, with its cause, by the next call of `save`, `check`, `wait` or
    `submit`. Nothing is announced or deleted until the new checkpoint was read back. `location` is
    `checkpoints/` of the run; `keep` newest ones stay beside the best, and multiples of
    `keep_every`.
    """

    def __init__(self, location: Location, keep: int = 2, keep_every: int | None = None) -> None:
        self.folder = open_folder(location)
        self.keep, self.keep_every = keep, keep_every
        # Called by the writing thread with the step of a whole checkpoint.
        self.announce: Callable[[int], None] = lambda step: None
        self.written_s = self.written_cpu_s = 0.0  # of the last write: wall and thread's own
        self._blocked_s = 0.0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._write: _Write | None = None
        self._error: BaseException | None = None
        self._whole: set[int] = set()

    def save(self, step: int, parts: Tensors, facts: JsonMapping, *, best: bool) -> Folder:
        """Write, read back and verify a checkpoint; return its folder."""
        self.submit(step, lambda: (parts, facts), best=best)
        self.wait()
        return self.folder.child(get_folder_name(step))

    def submit(
        self,
        step: int,
        collect: Callable[[], tuple[Tensors, JsonMapping]],
        *,
        best: bool,
        before: Callable[[], None] | None = None,
    ) -> None:
        """Copy a state to the host and write it in the thread, after an earlier write.

        `collect` returns host copies that nothing else changes, and facts; not called if this
        step's checkpoint is written or being written: then only `best` counts. `before` is called
        by the thread before the checkpoint appears.
        """
        if not self.needs(step):
            self.note(step, best=best)
            return
        self.wait()
        with self._blocking():
            parts, facts = collect()
            self._write = _Write(step, parts, facts, best, before)
            self._thread = threading.Thread(target=self._run, name="checkpoint-writer")
            self._thread.start()

    def needs(self, step: int) -> bool:
        """Return whether `submit` would collect this step."""
        with self._lock:
            is_coming = self._write is not None and self._write.step == step
            return step not in self._whole and not is_coming

    def note(self, step: int, *, best: bool) -> None:
        """Mark a written step as the best, if it is; `check` raises an error of this."""
        with self._lock:
            if self._write is not None and self._write.step == step:
                self._write.best |= best
                return
        if not best or step not in self._whole:
            return
        with self._blocking():
            if self._thread is not None:
                self._thread.join()
            try:
                self._mark_best(step)
            except OSError as error:
                self._error = self._error or error

    def check(self) -> None:
        """Raise a CheckpointError of the writing thread; earlier checkpoints remain."""
        error, self._error = self._error, None
        if isinstance(error, CheckpointError):
            raise error
        if error is not None:
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            ways_out = (
                "earlier ones remain: repair the storage and continue with --resume auto",
                "there is no earlier one: repair the storage and start again",
            )
            raise CheckpointError(
                f"no checkpoint could be written to {self.folder}: {reason}; "
                f"{ways_out[self._has_none()]}"
            ) from error

    def _has_none(self) -> bool:
        """Return whether there is no checkpoint; False if the folder cannot be listed."""
        try:
            return not self._whole and not list_steps(self.folder)
        except OSError:
            return False

    def wait(self, limit_s: float | None = None) -> bool:
        """Wait for the current write; return whether it has ended. Raises as `check` does."""
        if self._thread is not None:
            with self._blocking():
                self._thread.join(limit_s)
            if self._thread.is_alive():
                return False
            self._thread = None
        self.check()
        return True

    def pop_blocked_s(self) -> float:
        """Return the seconds for which the loop was blocked since the last call."""
        blocked, self._blocked_s = self._blocked_s, 0.0
        return blocked

    def list_steps(self) -> list[int]:
        is_local = isinstance(self.folder, LocalFolder)
        return [
            step
            for step in list_steps(self.folder)
            if is_local or COMMIT_FILE in self._get_folder(step).list_names()
        ]

    def mark_verified(self, step: int) -> None:
        """Record that this step's checkpoint was read and equals the state."""
        self._whole.add(step)

    def hide_later_than(self, step: int) -> None:
        """Hide later checkpoints, because the run continues from `step` differently."""
        self._whole = {whole for whole in self._whole if whole <= step}
        with contextlib.suppress(CheckpointError):
            if (read_best_step(self.folder) or 0) > step:
                self.folder.remove_file(BEST_FILE)
        for later in self.list_steps():
            if later > step:
                get_logger().warning("%s is set aside", self._get_folder(later))
                self._get_folder(later).set_aside()

    @contextlib.contextmanager
    def _blocking(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._blocked_s += time.perf_counter() - began

    def _run(self) -> None:
        write = self._write
        assert write is not None
        began, began_cpu = time.perf_counter(), time.thread_time()
        try:
            folder = self._get_folder(write.step)
            if write.before is not None:
                write.before()
            write_checkpoint(folder, write.parts, write.facts)
            self._whole.add(write.step)
            self.written_s = time.perf_counter() - began
            self.written_cpu_s = time.thread_time() - began_cpu
            get_logger().info("checkpoint %s saved and read back", folder)
        except BaseException as error:
            self._error = error
        with self._lock:
            self._write = None
        if self._error is None:
            self._tidy(write)

    def _tidy(self, write: _Write) -> None:
        try:
            self.announce(write.step)
            if write.best:
                self._mark_best(write.step)
            self._prune(write.step)
            self.folder.remove_leftovers()
        except BaseException as error:
            self._error = error

    def _mark_best(self, step: int) -> None:
        self.folder.write_text(BEST_FILE, json.dumps({"schema_version": 2, "step": step}))

    def _prune(self, newest: int) -> None:
        """Delete checkpoints except new, best and multiples; `newest` was just verified."""
        try:
            best = read_best_step(self.folder)
        except CheckpointError as error:
            get_logger().warning("no checkpoint is deleted, the best one is unknown: %s", error)
            return
        steps = self.list_steps()
        kept = {newest, best, *steps[-self.keep :]}
        for step in steps:
            is_multiple = self.keep_every is not None and step % self.keep_every == 0
            if step not in kept and not is_multiple:
                self._get_folder(step).remove()

    def _get_folder(self, step: int) -> Folder:
        return self.folder.child(get_folder_name(step))
