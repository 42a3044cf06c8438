"""`StepTimer`: times the loop by the host's clock alone."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from store.record.catalogue import STEP_S, WAIT_S
from store.record.spans import COMPILE, EVALUATION, INPUT, ROLLBACK, STALL, STEP, WINDOW, WRITE

if TYPE_CHECKING:
    from store.record.spans import SpanWriter
    from store.record.windows import QuantileWriter
    from utils.runtime.base import Runtime

# The first steps of an attempt have a line each; later ones if they take so many times the median,
# up to a limit.
_FIRST_STEPS = 200
_SLOW, _MOST_SLOW = 3.0, 10_000
# Number of steps of the median.
_RECENT = 128
# A step has ended before these spans.
_BETWEEN_STEPS = ("evaluation", "checkpoint")


class StepTimer:
    """Watches a runtime's spans: the writing rank saves them, every rank counts its steps.

    A step's time begins after its wait for input and ends before the next wait, without evaluations
    and checkpoints. Nothing here reads the device. `step` steps were done before this attempt;
    `writer` is None on ranks that do not write; `keeper` counts the time of each step, and its
    wait.
    """

    def __init__(
        self, runtime: Runtime, step: int, writer: SpanWriter | None, keeper: QuantileWriter
    ) -> None:
        self._runtime, self._writer, self._keeper = runtime, writer, keeper
        self._shift = time.time() - time.perf_counter()
        self.done = step  # steps that have ended
        self._current = step
        self._step_began: float | None = None  # the step that runs, once it has its input
        self._input_began = self._wait_s = 0.0
        self._is_made = False
        self._seen = self._slow = 0
        self._recent: list[float] = []
        self._median = float("inf")
        self._compiled_s, self._graphs = 0.0, 0
        self._window_began: float | None = None
        self._window: tuple[int, float, float] = (0, 0.0, 0.0)
        self._note_compiling(time.perf_counter() - runtime.instruments.get_compile_s())
        runtime.instruments.watcher = self

    def begin_step(self, step: int) -> None:
        """Begin a step, numbered from 0; the one before has ended."""
        self._end_step(time.perf_counter())
        self._current = step

    def begin_span(self, name: str, now: float) -> None:
        """Begin a span of the loop, by the runtime's clock."""
        if name in _BETWEEN_STEPS:
            self._end_step(now)
        if name == "input" and self._window_began is None:
            self._window_began = now

    def end_span(self, name: str, began: float, now: float) -> None:
        if name == "input":
            self._input_began, self._wait_s, self._step_began = began, now - began, now
        elif name == "step":
            self._is_made = True
        elif name == "evaluation":
            self._add(EVALUATION, began, now - began)
            self._note_compiling(began)

    def end_window(self, step: int) -> None:
        """Write the window of a log line: sums of the steps since the line before."""
        if self._current < step:
            self._end_step(time.perf_counter())
        count, step_s, wait_s = self._window
        # The next step may run already: a log line is read one step late.
        is_between = self._step_began is None
        now = time.perf_counter() if is_between else self._input_began
        began, self._window_began = self._window_began, None if is_between else now
        self._window = (0, 0.0, 0.0)
        if not count or began is None:
            return
        self._note_compiling(began)
        self._add(WINDOW, began, now - began, count=count, step_s=step_s, input_wait_s=wait_s)
        if self._writer is not None:
            self._writer.flush()

    @contextlib.contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """Record the time of a block that the loop waits for outside steps."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._add(name, began, time.perf_counter() - began)

    def note_write(self, step: int, seconds: float) -> None:
        """Record a checkpoint and the seconds of its writing; called by its thread."""
        if self._writer is not None:
            self._writer.add(WRITE, step, time.time() - seconds, seconds)

    def note_stall(self, seconds: float) -> None:
        """Record how long the loop has been stalled, before the program ends."""
        if self._writer is not None:
            self._writer.add(STALL, self.done, time.time() - seconds, seconds)
            self._writer.flush()

    def note_rollback(self, step: int, began: float) -> None:
        """Record a rollback to a step; `began`: by `time.perf_counter`."""
        lost, self.done = max(0, self.done - step), step
        self._add(ROLLBACK, began, time.perf_counter() - began, count=lost)
        self._step_began = self._window_began = None

    def end_steps(self) -> None:
        """End the running step and its window: no step follows for now."""
        self._end_step(time.perf_counter())
        self.end_window(self.done)

    def close(self) -> None:
        self._runtime.instruments.watcher = None
        if self._writer is not None:
            self._writer.close()

    def _end_step(self, now: float) -> None:
        began, self._step_began = self._step_began, None
        is_made, self._is_made = self._is_made, False
        if began is None:
            return
        self.done = self._current + 1
        if not is_made:
            return  # its batch was drawn and dropped
        step_s, wait_s = now - began, self._wait_s
        count, steps_s, waits_s = self._window
        self._window = (count + 1, steps_s + step_s, waits_s + wait_s)
        self._keeper.add(STEP_S, step_s)
        self._keeper.add(WAIT_S, wait_s)
        self._seen += 1
        whole_s = step_s + wait_s
        self._recent.append(whole_s)
        is_slow = whole_s > _SLOW * self._median and self._slow < _MOST_SLOW
        if len(self._recent) == _RECENT:
            self._median = statistics.median(self._recent)
            self._recent.clear()
        if self._seen > _FIRST_STEPS and not is_slow:
            return
        self._slow += self._seen > _FIRST_STEPS
        self._note_compiling(began)
        self._add(INPUT, self._input_began, wait_s)
        self._add(STEP, began, step_s)

    def _note_compiling(self, began: float) -> None:
        """Record what was compiled since the last call, as one span that began at `began`."""
        seconds = self._runtime.instruments.get_compile_s()
        if seconds <= self._compiled_s:
            return
        gained, self._compiled_s = seconds - self._compiled_s, seconds
        graphs = self._runtime.counters()["graphs"]
        count, self._graphs = graphs - self._graphs, graphs
        self._add(COMPILE, began, gained, count=count)

    def _add(self, name: str, began: float, seconds: float, **more: float) -> None:
        if self._writer is not None:
            self._writer.add(name, self.done, self._shift + began, seconds, **more)
