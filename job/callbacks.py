"""`RunCallbacks`: what the engine calls back, so that a run is never lost."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from engine import Callbacks, sum_batches
from job.answers import Answers, describe_split
from job.recorder import LoopRecorder
from job.resume import describe_hardware, roll_back_state
from job.stream import iterate_batches
from models.teachers.teacher import PAST
from store.query.changes import hash_config
from store.record.catalogue import GRAD_NORM, TRAIN
from store.record.hits import HitsFile
from store.record.spans import HELD, SpanWriter
from store.record.windows import SketchKeeper
from tasks.protocol import HasExtraSets
from utils.checkpoint.files import CheckpointError
from utils.checkpoint.manager import CheckpointManager
from utils.checkpoint.state import collect_state
from utils.config.keys import get_resume_rules
from utils.json_types import JsonMapping, JsonObject
from utils.log import get_logger
from utils.metrics import LostRunError, MetricWriter
from utils.progress import Progress
from utils.runtime.tracing import Tracer
from utils.stall import StallWatch
from utils.stopping import StopRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from datasets import Batch
    from engine import TrainState
    from job.ahead import StepsAhead
    from job.build import Parts
    from job.spec import Job
    from store.record.session import RunSession
    from utils.checkpoint.files import Tensors
    from utils.metrics import Evaluation
    from utils.runtime.base import Runtime

T = TypeVar("T")
# Steps between two questions to all ranks whether one was asked to end.
AGREE_EVERY = 8
# Seconds between two looks at a checkpoint that is being written, while the loop waits for it.
LOOK_EVERY_S = 10.0


class RunCallbacks(Callbacks):
    """Metrics, checkpoints, requests to end, going back and the stall watch of one replica.

    As a context it makes sure that a checkpoint that is being written ends whole.

    Args:
      ahead: makes steps of shapes to come before the first step; none: nobody does.
    """

    def __init__(
        self,
        runtime: Runtime,
        job: Job,
        parts: Parts,
        session: RunSession | None,
        ahead: StepsAhead | None = None,
    ) -> None:
        config, step = job.config, parts.state.step
        self.runtime, self.job, self.parts, self.session = runtime, job, parts, session
        self.ahead = ahead
        self.max_rollbacks = config.train.max_rollbacks
        self.stop = StopRequest()
        self.manager = CheckpointManager(
            job.run.checkpoints, config.train.keep_checkpoints, config.train.keep_every_steps
        )
        self.writer = spans = folder = self._hits = None
        if session is not None:
            self.manager.announce = self._note_checkpoint
            folder = job.run.path
            spans = SpanWriter(folder, session.attempt)
            self.writer = MetricWriter(
                folder, first_step=step, attempt=session.attempt, mirror=session.mirror,
                tensorboard=config.run.tensorboard,
            )  # fmt: skip
            self._hits = HitsFile(folder)
            self._hits.drop_later_than(step)
            if job.checkpoint is not None:
                self.manager.hide_later_than(step)
                self.manager.mark_verified(step)
        kept = () if folder is None or job.checkpoint is None else self.manager.list_steps()
        self.keeper = SketchKeeper(config.quantile.epsilon, step, folder, kept)
        self.recorder = LoopRecorder(runtime, step, spans, self.keeper)
        self._progress = Progress(step, parts.plan.total_steps, enabled=runtime.ranks.is_writer)
        self._tracer = Tracer(runtime, config.profile.steps, job.run.path / "profile")
        self._watch = StallWatch(
            config.train.stall_timeout_s,
            lambda: runtime.instruments.current_span,
            self._report_stall,
        )
        self._listening = self.stop.listen()

    def __enter__(self) -> RunCallbacks:
        self._listening.__enter__()
        if self.job.config.train.on_nonfinite == "rollback" and self.parts.state.step == 0:
            self.save(self.parts.state, False)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.recorder.end_steps()
        try:
            if error is None:
                with self.recorder.hold(HELD):
                    self._await_write()
            else:
                self._watch.close()  # no loop is left to watch
                self.manager.wait()
        except CheckpointError as failure:
            if error is None:
                raise
            get_logger().error("%s", failure)
        finally:
            self._listening.__exit__(None, None, None)
            self._watch.close()
            self._tracer.close()
            self._progress.close()
            self.recorder.close()
            self.keeper.write(self.recorder.done)
            if self.writer is not None:
                self.writer.close()

    def get_batches(self, step: int) -> Iterator[Batch]:
        """Training batches from a step on, with all that travels with them."""
        state = self.parts.state
        begun_with = state.input_processes
        # From here on positions count on this run's processes.
        state.input_processes = self.parts.train_loader.shard[1]
        batches = iterate_batches(self.parts, step, begun_with)
        return batches if self.ahead is None else self.ahead.watch(batches)

    def begin_step(self, step: int) -> None:
        """A sign of life, and a trace that may start or end."""
        if self.ahead is not None:
            self.ahead.run(self._watch.beat)
        self._watch.beat()
        self._tracer.begin_step(step)
        self.recorder.begin_step(step)

    def evaluate(self, state: TrainState) -> Evaluation:
        """The task's verdict on the evaluated weights over the evaluation split.

        What it says of further sets stands beside it, and decides nothing.
        """
        batches = self._watch.follow(self.parts.eval_loader.batches())
        answers = Answers(self.parts.task, self.runtime, describe_split(self.job))
        evaluation = answers.evaluate(state.eval_model, batches)
        for name, average in state.averages.items():
            if name in ("ema", PAST):
                continue  # the first one is evaluated above, and the past is no average
            more = self._evaluate_more(average).metrics
            evaluation.metrics.update({f"{name}/{key}": value for key, value in more.items()})
        hits = answers.gather(state.step)
        if self._hits is not None and hits is not None:
            self._hits.note(hits, is_best=_is_best(state, evaluation))
        self._gather_numbers()
        plan, follow = self.parts.plan, self._watch.follow
        number = None if state.step >= plan.total_steps else state.step // plan.eval_every
        task = self.parts.task
        if not isinstance(task, HasExtraSets):
            return evaluation
        found = task.judge(
            state.eval_model,
            lambda count, batches: sum_batches(count, follow(batches), self.runtime),
            number,
        )
        strange = next((name for name, value in found.items() if not math.isfinite(value)), None)
        if strange is not None:
            get_logger().warning("step %d: %s of data.evals is not finite", state.step, strange)
        name = task.score_metric
        score = found.get(name, math.nan) if name else evaluation.score
        return replace(evaluation, beside=found, score=score)

    def _evaluate_more(self, model: nn.Module) -> Evaluation:
        # Its answers are marked and not kept: so it is the same graph.
        batches = self._watch.follow(self.parts.eval_loader.batches())
        return Answers(self.parts.task, self.runtime).evaluate(model, batches)

    def write(self, step: int, kind: str, scalars: dict[str, float]) -> None:
        """A line of metrics, written and shown; what the checkpoint thread met is raised here."""
        self._watch.beat()
        if self.session is not None and self.session.is_lost:
            raise LostRunError(
                f"another program has taken over {self.job.run.place}: this one had been silent "
                "for too long; let the other go on"
            )
        if self.runtime.ranks.size == 1:
            self.manager.check()  # several ranks look at it together: should_stop, save
        line = {**scalars, **self.parts.train_loader.counters}
        if kind == TRAIN:
            line["checkpoint_held_s"] = self.manager.pop_blocked_s()
            self._progress.show(step, scalars)
            self.recorder.end_window(step)
            if self.writer is not None and GRAD_NORM in scalars:
                self.keeper.add(GRAD_NORM, scalars[GRAD_NORM])  # alike on all ranks
        else:
            self._progress.tell(step, f"{kind} {self.parts.task.describe(scalars)}")
        if self.writer is not None:
            self.writer.write(step, kind, line)
            self.keeper.write_if_due(self.recorder.done)

    def save(self, state: TrainState, best: bool) -> None:
        """Take the state to the host and have it written beside the loop, by rank zero."""
        with self.recorder.hold(HELD):
            self._save(state, best)

    def _save(self, state: TrainState, best: bool) -> None:
        # Only the writer knows, and a shard of a global array is fetched by all hosts or by none.
        is_needed = self._ask_writer(partial(self.manager.needs, state.step))
        if is_needed:
            self._await_write()
            self._gather_numbers()
            self.keeper.cut(state.step)
        if not is_needed:
            self.manager.note(state.step, best=best)
        elif self.writer is not None:
            collect = partial(self._collect, state)
            self.manager.submit(
                state.step, collect, best=best, before=partial(self._sync, state.step)
            )
        elif self.runtime.local_devices > 1:
            self._collect(state)
        self._watch.beat()

    def should_stop(self, step: int) -> bool:
        """Whether any rank was asked to end; alike on all of them."""
        if self.runtime.ranks.size > 1 and step % AGREE_EVERY:
            return False
        self._ask_writer(self.manager.check)
        asked = self.runtime.ranks.any(bool(self.stop.reason))
        if asked:
            get_logger().warning(
                "asked to end (%s): saving step %d", self.stop.reason or "by another rank", step
            )
        return asked

    def roll_back(self, state: TrainState, bad_step: int) -> bool:
        """Go back to the last checkpoint and skip the batch of a bad step, if that is wanted."""
        if self.job.config.train.on_nonfinite != "rollback":
            return False
        if len(state.skipped_steps) >= self.max_rollbacks:
            get_logger().error("train.max_rollbacks (%d) is used up", self.max_rollbacks)
            return False
        self.recorder.end_steps()
        began = time.perf_counter()
        self._await_write()
        if not roll_back_state(self.runtime, self.job, state, bad_step):
            return False
        get_logger().warning(
            "step %d was not finite: back to step %d, its batch is skipped", bad_step, state.step
        )
        if self.writer is not None:
            self.manager.hide_later_than(state.step)
            self.writer.rewind(state.step)
            self._hits.drop_later_than(state.step)
            # Where a broken checkpoint was passed over, less is final than before.
            facts = {"skipped_steps": list(state.skipped_steps), "final_up_to_step": state.step}
            self.job.run.update(**facts)
        self.keeper.go_back(state.step)
        self.recorder.note_rollback(state.step, began)
        return True

    def _await_write(self) -> None:
        """Until nothing is being written; an upload may outlast every rank's patience with another.

        Raises:
          CheckpointError: on every rank, where the write has failed.
        """
        while not self._ask_writer(partial(self.manager.wait, LOOK_EVERY_S)):
            self._watch.beat()

    def _ask_writer(self, ask: Callable[[], T]) -> T | None:
        """The writer's answer on every rank, its failure as well; called by all of them alike.

        Raises:
          CheckpointError: on every rank, where the writer met it.
        """
        answer = failure = None
        if self.writer is not None:
            try:
                answer = ask()
            except CheckpointError as error:
                failure = error
        answer, text = self.runtime.ranks.broadcast_value((answer, failure and str(failure)))
        if text is not None:
            raise failure or CheckpointError(text)
        return answer

    def _gather_numbers(self) -> None:
        """Bring together what each rank has counted; called by all of them alike."""
        if self.runtime.ranks.size == 1:
            return
        told = self.runtime.ranks.gather(self.keeper.hand_over())
        if self.writer is not None:
            self.keeper.take_over(told)

    def _sync(self, step: int) -> None:
        """Have all that a checkpoint counts on where it will be looked for; by its thread."""
        kept = None
        with contextlib.suppress(OSError):
            kept = self.manager.list_steps()
        self.keeper.save(step, kept)
        self.writer.sync()

    def _collect(self, state: TrainState) -> tuple[Tensors, JsonMapping]:
        parts, facts = collect_state(state, self.runtime.fetch_all)
        return parts, facts | describe_checkpoint(self.runtime, self.job, self.parts)

    def _note_checkpoint(self, step: int) -> None:
        """A checkpoint stands whole; called by the thread that wrote it."""
        self.session.note_checkpoint(step)
        self.recorder.note_write(step, self.manager.written_s)

    def _report_stall(self, reason: str) -> None:
        if self.session is not None:
            self.session.end(self.parts.state.step, "failed", reason)
        self.recorder.note_stall(self.job.config.train.stall_timeout_s)


def _is_best(state: TrainState, evaluation: Evaluation) -> bool:
    """Whether no evaluation has given a higher score, as the loop decides it behind this."""
    return evaluation.is_finite and (
        state.best_score is None or evaluation.score > state.best_score
    )


def describe_checkpoint(runtime: Runtime, job: Job, parts: Parts) -> JsonObject:
    """What a checkpoint tells beside its tensors: position, schedule, seeds, configuration."""
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
        # Host and device are seeded from (seed, step, rank) before each step: no state of theirs.
        "rng": {"seed": plan.seed, "step": state.step, "device": {}},
        "model": job.facts.export,
        "teachers": job.facts.teachers,
        "config": config,
        "config_hash": hash_config(config, get_resume_rules()),
        "environment": describe_hardware(runtime),
    }
