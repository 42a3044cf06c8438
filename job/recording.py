"""`Recording`: numbers, times and answers of one replica, as its run directory keeps them."""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tqdm import tqdm

from job.metric_writer import MetricWriter
from job.recorder import LoopRecorder
from store.record.catalogue import GRAD_NORM, LOSS, TRAIN
from store.record.hits import HitsFile
from store.record.spans import SpanWriter
from store.record.windows import QuantileWriter
from utils.log import get_logger
from utils.runtime.instruments import Tracer

if TYPE_CHECKING:
    from engine import TrainState
    from job.build import Parts
    from job.spec import Job
    from store.record.hits import Hits
    from store.record.session import RunSession
    from utils.runtime.base import Runtime

# Names and patterns of the catalogue that are shown, in this order.
_SHOWN = ("loss/total", "loss/*", "lr", "grad_norm", "*_per_s")


@dataclass(frozen=True)
class Replica:
    """One replica of a run.

    Args:
      session: of the rank that writes; None on the others.
    """

    runtime: Runtime
    job: Job
    parts: Parts
    session: RunSession | None


class Recording:
    """Keeps metrics, spans, sketches, answers and profiles; only one rank writes them.

    Args:
      kept: steps of the checkpoints that the run goes on from.

    Attributes:
      writer: of metrics; None on ranks that do not write.
      keeper: of sketches of numbers.
      recorder: of times.
    """

    def __init__(self, replica: Replica, kept: Sequence[int]) -> None:
        self._replica = replica
        runtime, job, session = replica.runtime, replica.job, replica.session
        config, step = job.config, replica.parts.state.step
        self.writer = self._hits = spans = folder = None
        if session is not None:
            folder = job.run.path
            spans = SpanWriter(folder, session.attempt)
            self.writer = MetricWriter(
                folder, first_step=step, attempt=session.attempt, mirror=session.mirror,
                tensorboard=config.run.tensorboard,
            )  # fmt: skip
            self._hits = HitsFile(folder)
            self._hits.drop_later_than(step)
        self.keeper = QuantileWriter(config.quantile.epsilon, step, folder, kept)
        self.recorder = LoopRecorder(runtime, step, spans, self.keeper)
        total_steps = replica.parts.plan.total_steps
        self._progress = Progress(step, total_steps, enabled=runtime.ranks.is_writer)
        self._tracer = Tracer(runtime, config.profile.steps, job.run.path / "profile")

    def close(self) -> None:
        """Write what is left."""
        self._tracer.close()
        self._progress.close()
        self.recorder.close()
        self.keeper.write(self.recorder.done)
        if self.writer is not None:
            self.writer.close()

    def begin_step(self, step: int) -> None:
        """A trace may start or end."""
        self._tracer.begin_step(step)
        self.recorder.begin_step(step)

    def write(
        self, step: int, kind: str, scalars: dict[str, float], line: dict[str, float]
    ) -> None:
        """Write a line of metrics, and show its scalars."""
        if kind == TRAIN:
            self._progress.show(step, scalars)
            self.recorder.end_window(step)
            if self.writer is not None and GRAD_NORM in scalars:
                self.keeper.add(GRAD_NORM, scalars[GRAD_NORM])  # alike on all ranks
        else:
            self._progress.tell(step, f"{kind} {self._replica.parts.task.describe(scalars)}")
        if self.writer is not None:
            self.writer.write(step, kind, line)
            self.keeper.write_if_due(self.recorder.done)

    def note_hits(self, hits: Hits | None, *, is_best: bool) -> None:
        """Keep which examples were answered rightly, where that is known."""
        if self._hits is not None and hits is not None:
            self._hits.note(hits, is_best=is_best)

    def gather_numbers(self) -> None:
        """Bring together what each rank has counted; called by all of them alike."""
        ranks = self._replica.runtime.ranks
        if ranks.size == 1:
            return
        told = ranks.gather(self.keeper.hand_over())
        if self.writer is not None:
            self.keeper.take_over(told)

    def go_back(self, state: TrainState, began: float) -> None:
        """Drop what is later than a state that was restored after a bad step.

        Args:
          began: when the loop met that step, by `time.perf_counter`.
        """
        if self.writer is not None:
            self.writer.rewind(state.step)
            self._hits.drop_later_than(state.step)
            # Where a broken checkpoint was passed over, less is final than before.
            facts = {"skipped_steps": list(state.skipped_steps), "final_up_to_step": state.step}
            self._replica.job.run.update(**facts)
        self.keeper.go_back(state.step)
        self.recorder.note_rollback(state.step, began)


class Progress:
    """Shows log points and evaluations; silent when not enabled (other ranks)."""

    def __init__(self, step: int, total_steps: int, *, enabled: bool) -> None:
        self._enabled = enabled
        self._total_steps = total_steps
        self._bar = None
        if enabled and sys.stderr.isatty():
            self._bar = tqdm(total=total_steps, initial=step, unit="step", dynamic_ncols=True)

    def show(self, step: int, scalars: dict[str, float]) -> None:
        """A log point's numbers."""
        if not self._enabled:
            return
        names = dict.fromkeys(name for one in _SHOWN for name in fnmatch.filter(scalars, one))
        shown = ", ".join(f"{name.removeprefix(LOSS)} {scalars[name]:.4g}" for name in names)
        if self._bar is None:
            get_logger().info("step %d/%d: %s", step, self._total_steps, shown)
            return
        self._bar.update(step - self._bar.n)
        self._bar.set_postfix_str(shown)

    def tell(self, step: int, text: str) -> None:
        """What an evaluation has found."""
        if not self._enabled:
            return
        if self._bar is None:
            get_logger().info("step %d: %s", step, text)
            return
        self._bar.update(step - self._bar.n)
        self._bar.write(f"step {step}: {text}", file=sys.stderr)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.close()
