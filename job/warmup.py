"""Compiles the steps of all later batch shapes before the first step."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from engine import run_steps
from tasks.protocol import ChangesShape
from utils.checkpoint.state import collect_state, restore_state
from utils.log import get_logger

if TYPE_CHECKING:
    from datasets import Batch
    from engine import Task
    from job.build import Parts
    from utils.checkpoint.files import StateFacts, Tensors
    from utils.runtime.base import Runtime


class ShapeWarmup:
    """Compiles later shapes, and tests their memory, at the start instead of after hours.

    Each step is really executed, so that its graph is the same later; then the state is restored
    bit for bit.
    """

    def __init__(self, runtime: Runtime, parts: Parts, task: Task[Batch]) -> None:
        self._runtime, self._parts, self._task = runtime, parts, task
        self._shapes: list[Batch] | None = None  # None before the first batch
        self._kept: tuple[Tensors, StateFacts] | None = None  # until later shapes were tried

    def watch(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Return the same batches, after reading the later shapes from the first one."""
        if self._shapes is not None:
            return batches
        self._shapes = []
        parts, first = self._parts, next(batches)
        total_steps = parts.plan.total_steps
        if isinstance(parts.task, ChangesShape):
            self._shapes = [*parts.task.list_future_shapes(parts.state.step, total_steps, first)]
        if self._shapes:
            self._kept = collect_state(parts.state, self._runtime.fetch_all)
            # Restored here too, so that the graph of restoring is not counted as a step's.
            self._restore()
        return itertools.chain([first], batches)

    def run(self, beat: Callable[[], None]) -> None:
        """Execute one step of each later shape, then restore the state; `beat` after each."""
        if not self._shapes:
            return
        shapes = self._shapes
        self._shapes = []
        state, runtime, began = self._parts.state, self._runtime, time.perf_counter()
        instruments = runtime.instruments
        known = [set(group) for group in state.optimizer.param_groups]
        was_empty = not state.optimizer.state
        watcher, instruments.watcher = instruments.watcher, None  # these are no steps of the run
        state.skipped_steps = ()
        try:
            steps = run_steps(state, shapes, self._task, runtime, self._parts.plan)
            with contextlib.closing(steps):
                for _ in steps:
                    beat()
        finally:
            instruments.watcher = watcher
        if was_empty:  # drop the entries of the first step
            state.optimizer.state.clear()
            for group, names in zip(state.optimizer.param_groups, known, strict=True):
                for name in set(group) - names:
                    del group[name]
        self._restore()
        self._kept = None
        seconds = time.perf_counter() - began
        get_logger().info("further shapes of the step tried: %d in %.1f s", len(shapes), seconds)

    def _restore(self) -> None:
        assert self._kept is not None
        restore_state(self._parts.state, *self._kept, "of this run's start")
        self._runtime.finish_step()
