"""`RunCallbacks`: what the engine calls back, so that a run is never lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine import Callbacks
from job.answers import Answers, add_further_sets, describe_split
from job.recording import Recording, Replica
from job.saving import Saving, open_checkpoints
from job.stopping import Stopping
from job.stream import iterate_batches
from models.teachers.teacher import PAST
from store.record.catalogue import TRAIN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from datasets import Batch
    from engine import TrainState
    from job.ahead import StepsAhead
    from job.build import Parts
    from job.spec import Job
    from store.record.session import RunSession
    from utils.metrics import Evaluation
    from utils.runtime.base import Runtime


class RunCallbacks(Callbacks):
    """Metrics, checkpoints, requests to end, going back and the stall watch of one replica.

    As a context it makes sure that a checkpoint that is being written ends whole.

    Args:
      ahead: makes steps of shapes to come before the first step; None if there are none.
    """

    def __init__(
        self,
        runtime: Runtime,
        job: Job,
        parts: Parts,
        session: RunSession | None,
        ahead: StepsAhead | None = None,
    ) -> None:
        self.runtime, self.job, self.parts, self.ahead = runtime, job, parts, ahead
        replica = Replica(runtime, job, parts, session)
        manager = open_checkpoints(replica)
        goes_on = session is not None and job.checkpoint is not None
        self.recording = Recording(replica, manager.list_steps() if goes_on else ())
        self.stopping = Stopping(replica, self.recording.recorder)
        self._watch = self.stopping.watch
        self.saving = Saving(replica, manager, self.recording, self._watch.beat)

    def __enter__(self) -> RunCallbacks:
        self.stopping.listening.__enter__()
        goes_back = self.job.config.train.on_nonfinite == "rollback"
        if goes_back and self.parts.state.step == 0:
            self.save(self.parts.state, False)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.recording.recorder.end_steps()
        try:
            if error is None:
                self.saving.finish()
            else:
                self._watch.close()  # no loop is left to watch
                self.saving.give_up()
        finally:
            self.stopping.listening.__exit__(None, None, None)
            self._watch.close()
            self.recording.close()

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
        self.recording.begin_step(step)

    def evaluate(self, state: TrainState) -> Evaluation:
        """The task's verdict on the evaluated weights over the evaluation split.

        What it says of further sets stands beside it, and decides nothing.
        """
        answers = Answers(self.parts.task, self.runtime, describe_split(self.job))
        evaluation = self._ask(answers, state.eval_model)
        for name, average in state.averages.items():
            if name in ("ema", PAST):
                continue  # the first one is evaluated above, and the past is no average
            # Its answers are marked and not kept: so it is the same graph.
            more = self._ask(Answers(self.parts.task, self.runtime), average).metrics
            evaluation.metrics.update({f"{name}/{key}": value for key, value in more.items()})
        self.recording.note_hits(answers.gather(state.step), is_best=_is_best(state, evaluation))
        self.recording.gather_numbers()
        return add_further_sets(evaluation, self.runtime, self.parts, self._watch.follow)

    def _ask(self, answers: Answers, model: nn.Module) -> Evaluation:
        return answers.evaluate(model, self._watch.follow(self.parts.eval_loader.batches()))

    def write(self, step: int, kind: str, scalars: dict[str, float]) -> None:
        """A line of metrics, written and shown; what the checkpoint thread met is raised here."""
        self._watch.beat()
        self.stopping.require_run()
        if self.runtime.ranks.size == 1:
            self.saving.manager.check()  # several ranks look at it together: should_stop, save
        line = {**scalars, **self.parts.train_loader.counters}
        if kind == TRAIN:
            line["checkpoint_held_s"] = self.saving.manager.pop_blocked_s()
        self.recording.write(step, kind, scalars, line)

    def save(self, state: TrainState, best: bool) -> None:
        """Take the state to the host and have it written beside the loop, by rank zero."""
        self.saving.save(state, best)

    def should_stop(self, step: int) -> bool:
        """Whether any rank was asked to end; alike on all of them."""
        if not self.stopping.is_due(step):
            return False
        self.saving.check()
        return self.stopping.is_asked(step)

    def roll_back(self, state: TrainState, bad_step: int) -> bool:
        """Go back to the last checkpoint and skip the batch of a bad step, if that is wanted."""
        return self.saving.roll_back(state, bad_step)


def _is_best(state: TrainState, evaluation: Evaluation) -> bool:
    """Whether no evaluation has given a higher score, as the loop decides it behind this."""
    return evaluation.is_finite and (
        state.best_score is None or evaluation.score > state.best_score
    )
