"""`Saving`: checkpoints of one replica, written beside its loop, and rollbacks to them."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from job.resume import describe_hardware, roll_back_state
from store.query.changes import hash_config
from store.record.spans import HELD
from utils.checkpoint.files import CheckpointError
from utils.checkpoint.manager import CheckpointManager
from utils.checkpoint.state import collect_state
from utils.config.keys import get_resume_rules
from utils.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine import TrainState
    from job.build import Parts
    from job.recording import Recording, Replica
    from job.spec import Job
    from utils.checkpoint.files import Tensors
    from utils.json_types import JsonMapping, JsonObject
    from utils.runtime.base import Runtime

T = TypeVar("T")
# Seconds between two checks of a checkpoint that is being written while the loop waits for it.
LOOK_EVERY_S = 10.0


def open_checkpoints(replica: Replica) -> CheckpointManager:
    """Open the run's checkpoints; those of steps that will be repeated are hidden."""
    job, step = replica.job, replica.parts.state.step
    train = job.config.train
    manager = CheckpointManager(job.run.checkpoints, train.keep_checkpoints, train.keep_every_steps)
    if replica.session is not None and job.checkpoint is not None:
        manager.hide_later_than(step)
        manager.mark_verified(step)
    return manager


class Saving:
    """Copies states to the host for rank zero to write; `beat` tells the stall watch of waiting."""

    def __init__(
        self,
        replica: Replica,
        manager: CheckpointManager,
        recording: Recording,
        beat: Callable[[], None],
    ) -> None:
        self._replica, self.manager = replica, manager
        self._recording, self._beat = recording, beat
        self.max_rollbacks = replica.job.config.train.max_rollbacks
        if replica.session is not None:
            manager.announce = self._note_checkpoint

    def save(self, state: TrainState, best: bool) -> None:
        """Copy the state to the host and have rank zero write it beside the loop."""
        with self._recording.recorder.hold(HELD):
            # Only the writer knows, and what is split is fetched by all ranks or none.
            if not self._run_on_writer(partial(self.manager.needs, state.step)):
                self.manager.note(state.step, best=best)
            else:
                self.await_write()
                runtime = self._replica.runtime
                self._recording.gather_numbers()
                self._recording.keeper.cut(state.step)
                collect = partial(self._collect, state)
                if self._replica.session is not None:
                    before = partial(self._sync, state.step)
                    self.manager.submit(state.step, collect, best=best, before=before)
                elif runtime.local_devices > 1 or runtime.ranks.hold_parts:
                    collect()
            self._beat()

    def check(self) -> None:
        """Raise the CheckpointError of the writing thread on every rank; called by all alike."""
        self._run_on_writer(self.manager.check)

    def finish(self) -> None:
        """Wait for the last write; its CheckpointError is raised on every rank."""
        with self._recording.recorder.hold(HELD):
            self.await_write()

    def give_up(self) -> None:
        """Wait for a write after the loop has failed; its error is only logged."""
        try:
            self.manager.wait()
        except CheckpointError as failure:
            get_logger().error("%s", failure)

    def roll_back(self, state: TrainState, bad_step: int) -> bool:
        """Go back to the last checkpoint and skip a bad step's batch; False if not configured."""
        replica = self._replica
        if replica.job.config.train.on_nonfinite != "rollback":
            return False
        if len(state.skipped_steps) >= self.max_rollbacks:
            get_logger().error("train.max_rollbacks (%d) is used up", self.max_rollbacks)
            return False
        self._recording.recorder.end_steps()
        began = time.perf_counter()
        self.await_write()
        if not roll_back_state(replica.runtime, replica.job, state, bad_step):
            return False
        get_logger().warning(
            "step %d was not finite: back to step %d, its batch is skipped", bad_step, state.step
        )
        if replica.session is not None:
            self.manager.hide_later_than(state.step)
        self._recording.go_back(state, began)
        return True

    def await_write(self) -> None:
        """Wait for writes, beating meanwhile; a CheckpointError is raised on every rank."""
        while not self._run_on_writer(partial(self.manager.wait, LOOK_EVERY_S)):
            self._beat()

    def _run_on_writer(self, function: Callable[[], T]) -> T | None:
        """Return the writer's result, or raise its failure, on every rank; called by all alike."""
        result = failure = None
        if self._replica.session is not None:
            try:
                result = function()
            except CheckpointError as error:
                failure = error
        pair = (result, failure and str(failure))
        result, text = self._replica.runtime.ranks.broadcast_value(pair)
        if text is not None:
            raise failure or CheckpointError(text)
        return result

    def _sync(self, step: int) -> None:
        """Flush and upload all that a checkpoint relies on; called by its thread."""
        kept = None
        with contextlib.suppress(OSError):
            kept = self.manager.list_steps()
        self._recording.keeper.save(step, kept)
        writer = self._recording.writer
        assert writer is not None  # the rank that saves also writes
        writer.sync()

    def _collect(self, state: TrainState) -> tuple[Tensors, JsonMapping]:
        replica = self._replica
        parts, facts = collect_state(state, replica.runtime.fetch_all)
        described = describe_checkpoint(replica.runtime, replica.job, replica.parts)
        return parts, facts.model_dump() | described

    def _note_checkpoint(self, step: int) -> None:
        """Record a complete checkpoint; called by the thread that wrote it."""
        session = self._replica.session
        assert session is not None  # the rank that saves also writes
        session.note_checkpoint(step)
        self._recording.recorder.note_write(step, self.manager.written_s)


def describe_checkpoint(runtime: Runtime, job: Job, parts: Parts) -> JsonObject:
    """Return a checkpoint's facts besides its tensors: position, schedule, seeds, configuration."""
    state, plan = parts.state, parts.plan
    epoch, batches = divmod(state.step, plan.steps_per_epoch)
    config = job.config.model_dump(mode="json")
    return {
        "data": {"epoch": epoch, "examples": batches * job.config.data.global_batch_size},
        "stream": job.stream,
        "schedule": {
            "total_steps": plan.total_steps,
            "steps_per_epoch": plan.steps_per_epoch,
            "lr": plan.schedule.get_lr(state.step, state.waited.cuts),
        },
        # Host and device are seeded from (seed, step, rank) before each step: they have no state.
        "rng": {"seed": plan.seed, "step": state.step, "device": {}},
        "model": job.facts.export,
        "teachers": job.facts.teachers,
        "config": config,
        "config_hash": hash_config(config, get_resume_rules()),
        "environment": describe_hardware(runtime),
    }
