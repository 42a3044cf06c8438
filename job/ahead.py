"""Steps of every shape that is still to come, made once before the first one counts."""

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
    import torch

    from datasets import Batch
    from engine import Task
    from job.build import Parts
    from utils.checkpoint.files import Tensors
    from utils.json_types import JsonObject
    from utils.runtime.base import Runtime


class StepsAhead:
    """Has later shapes compiled, and their memory tried, at the start and not after hours.

    A graph is compiled by running it, so that what a later step asks for is the very same. Each
    step is made in earnest, and the state is brought back bit for bit.

    Args:
      task: as the loop calls it.
    """

    def __init__(self, runtime: Runtime, parts: Parts, task: Task) -> None:
        self._runtime, self._parts, self._task = runtime, parts, task
        self._forms: list[Batch] | None = None  # none: nobody has asked yet
        self._kept: tuple[Tensors, JsonObject] = ({}, {})

    def watch(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches, of which the very first one is looked at, while nothing runs yet."""
        if self._forms is not None:
            return batches
        parts, first = self._parts, next(batches)
        total_steps = parts.plan.total_steps
        is_changing = isinstance(parts.task, ChangesShape)
        later = parts.task.list_later_forms if is_changing else lambda *_: []
        self._forms = later(parts.state.step, total_steps, first)
        if self._forms:
            self._kept = collect_state(parts.state, self._runtime.fetch_all)
            # Done twice because copying back is a graph, too: so that it is none of the steps'.
            self._bring_back()
        return itertools.chain([first], batches)

    def run(self, beat: Callable[[], None]) -> None:
        """Make one step of each shape, if there are any to make; nothing of it stays.

        Args:
          beat: is called after each of them.
        """
        if not self._forms:
            return
        forms, self._forms = self._forms, []
        state, runtime, began = self._parts.state, self._runtime, time.perf_counter()
        instruments = runtime.instruments
        known = [set(group) for group in state.optimizer.param_groups]
        was_empty = not state.optimizer.state
        watcher, instruments.watcher = instruments.watcher, None  # these are no steps of the run
        state.skipped_steps = ()
        try:
            steps = run_steps(state, forms, self._task, runtime, self._parts.plan)
            with contextlib.closing(steps):
                for _ in steps:
                    beat()
        finally:
            instruments.watcher = watcher
        if was_empty:
            _forget(state.optimizer, known)
        self._bring_back()
        self._kept = ({}, {})
        seconds = time.perf_counter() - began
        get_logger().info("further shapes of the step tried: %d in %.1f s", len(forms), seconds)

    def _bring_back(self) -> None:
        restore_state(self._parts.state, *self._kept, "of this run's start")
        self._runtime.finish_step()


def _forget(optimizer: torch.optim.Optimizer, known: list[set[str]]) -> None:
    """Drop what an optimizer has made in its first step."""
    optimizer.state.clear()
    for group, names in zip(optimizer.param_groups, known, strict=True):
        for name in set(group) - names:
            del group[name]
