"""`Recording`: metrics, spans and hits of one replica, written to its run directory."""

from __future__ import annotations

import fnmatch
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from tqdm import tqdm

from job.metric_writer import MetricWriter
from job.step_timer import StepTimer
from job.steps.profiling import Profiler
from store.record.catalogue import GRAD_NORM, LOSS, TRAIN
from store.record.epoch_means import EpochMeans
from store.record.hits import HitsFile
from store.record.spans import SpanWriter
from store.record.windows import QuantileWriter
from utils.log import get_logger

if TYPE_CHECKING:
    from engine import TrainState
    from job.build import Parts
    from job.spec import Job
    from store.record.hits import Hits
    from store.record.session import RunSession
    from utils.runtime.base import Runtime

# Names and patterns of the catalogue for progress lines, in this order.
_SHOWN = ("loss/total", "loss/*", "lr", "grad_norm", "*_per_s")


@dataclass(frozen=True)
class Replica:
    """One replica of a run; `session` is None on ranks that do not write."""

    runtime: Runtime
    job: Job
    parts: Parts
    session: RunSession | None


class Recording:
    """Records metrics, spans, sketches, hits and profiles; only one rank writes them.

    `kept` are steps of the checkpoints of a resumed run. `writer` of metrics is None on ranks that
    do not write; `keeper` has sketches of numbers, `recorder` times.
    """

    def __init__(self, replica: Replica, kept: Sequence[int]) -> None:
        self._replica = replica
        runtime, job, session = replica.runtime, replica.job, replica.session
        config, step, plan = job.config, replica.parts.state.step, replica.parts.plan
        self.writer = self._hits = spans = folder = None
        if session is not None:
            folder = job.run.path
            spans = SpanWriter(folder, session.attempt)
            self.writer = MetricWriter(
                folder,
                first_step=step,
                attempt=session.attempt,
                mirror=session.mirror,
                epochs=EpochMeans(plan.steps_per_epoch, plan.global_batch_size),
                tensorboard=config.run.tensorboard,
            )
            self._hits = HitsFile(folder)
            self._hits.drop_later_than(step)
        self.keeper = QuantileWriter(config.quantile.epsilon, step, folder, kept)
        self.recorder = StepTimer(runtime, step, spans, self.keeper)
        self._progress = Progress(step, plan.total_steps, enabled=runtime.ranks.is_writer)
        attempt = None if session is None else session.attempt
        self._profiler = Profiler(runtime, job, replica.parts, attempt)

    def close(self) -> None:
        self._profiler.close()
        self._progress.close()
        self.recorder.close()
        self.keeper.write(self.recorder.done)
        if self.writer is not None:
            self.writer.close()

    def begin_step(self, step: int) -> None:
        """Start or end a trace and the step's times."""
        self._profiler.begin_step(step)
        self.recorder.begin_step(step)

    def write(
        self, step: int, kind: str, scalars: dict[str, float], line: dict[str, float]
    ) -> None:
        if kind == TRAIN:
            self._progress.show(step, scalars)
            self.recorder.end_window(step)
            self._profiler.look_for_request()
            if self.writer is not None and GRAD_NORM in scalars:
                self.keeper.add(GRAD_NORM, scalars[GRAD_NORM])  # alike on all ranks
        else:
            self._progress.tell(step, f"{kind} {self._replica.parts.task.describe(scalars)}")
        if self.writer is not None:
            self.writer.write(step, kind, line)
            self.keeper.write_if_due(self.recorder.done)

    def note_hits(self, hits: Hits | None, *, is_best: bool) -> None:
        """Save which examples were classified correctly, if known."""
        if self._hits is not None and hits is not None:
            self._hits.note(hits, is_best=is_best)

    def gather_numbers(self) -> None:
        """Gather the counts of each rank on the writer; called by all ranks alike."""
        ranks = self._replica.runtime.ranks
        if ranks.size > 1:
            counts = ranks.gather(self.keeper.hand_over())
            if self.writer is not None:
                self.keeper.take_over(counts)

    def go_back(self, state: TrainState, began: float) -> None:
        """Drop all later records after a rollback; `began`: `time.perf_counter` at the bad step."""
        if self.writer is not None:
            self.writer.rewind(state.step)
            assert self._hits is not None  # both exist where a rank writes
            self._hits.drop_later_than(state.step)
            # If a broken checkpoint was skipped, fewer steps are final than before.
            facts = {"skipped_steps": list(state.skipped_steps), "final_up_to_step": state.step}
            self._replica.job.run.update(**facts)
        self.keeper.go_back(state.step)
        self.recorder.note_rollback(state.step, began)


class Progress:
    """Shows log points and evaluations; silent if not enabled (on other ranks)."""

    def __init__(self, step: int, total_steps: int, *, enabled: bool) -> None:
        self._enabled = enabled
        self._total_steps = total_steps
        self._bar: tqdm[NoReturn] | None = None
        if enabled and sys.stderr.isatty():
            self._bar = tqdm(total=total_steps, initial=step, unit="step", dynamic_ncols=True)

    def show(self, step: int, scalars: dict[str, float]) -> None:
        if not self._enabled:
            return
        matches = (fnmatch.filter(scalars, pattern) for pattern in _SHOWN)
        names = dict.fromkeys(itertools.chain.from_iterable(matches))
        shown = ", ".join(f"{name.removeprefix(LOSS)} {scalars[name]:.4g}" for name in names)
        if self._bar is None:
            get_logger().info("step %d/%d: %s", step, self._total_steps, shown)
            return
        self._bar.update(step - self._bar.n)
        self._bar.set_postfix_str(shown)

    def tell(self, step: int, text: str) -> None:
        if not self._enabled:
            return
        if self._bar is None:
            get_logger().info("step %d: %s", step, text)
            return
        self._bar.update(step - self._bar.n)
        self._bar.write(f"step {step}: {text}", file=sys.stderr)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
