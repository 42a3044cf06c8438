"""`RunCallbacks`: recording, saving and stopping, called by the engine's loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine import Callbacks
from job.correctness import Correctness, add_further_sets, describe_split
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
    from job.build import Parts
    from job.spec import Job
    from job.warmup import ShapeWarmup
    from store.record.session import RunSession
    from utils.metrics import Evaluation
    from utils.runtime.base import Runtime


class RunCallbacks(Callbacks):
    """Metrics, checkpoints, stop requests, rollbacks and the stall watch of one replica.

    As a context manager it ensures that a checkpoint that is being written is completed. `ahead`
    compiles later batch shapes before step 1; None disables it.
    """

    def __init__(
        self,
        runtime: Runtime,
        job: Job,
        parts: Parts,
        session: RunSession | None,
        ahead: ShapeWarmup | None = None,
    ) -> None:
        self.runtime, self.job, self.parts, self.ahead = runtime, job, parts, ahead
        replica = Replica(runtime, job, parts, session)
        manager = open_checkpoints(replica)
        resumes = session is not None and job.checkpoint is not None
        self.recording = Recording(replica, manager.list_steps() if resumes else ())
        self.stopping = Stopping(replica, self.recording.recorder)
        self._watch = self.stopping.watch
        self.saving = Saving(replica, manager, self.recording, self._watch.beat)

    def __enter__(self) -> RunCallbacks:
        self.stopping.listening.__enter__()
        train = self.job.config.train
        returns = train.on_nonfinite == "rollback" or train.keep_bad_step
        if returns and self.parts.state.step == 0:
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
        state = self.parts.state
        # From here on positions refer to this run's processes.
        before, state.input_processes = state.input_processes, self.parts.train_loader.shard[1]
        batches = iterate_batches(self.parts, step, before)
        return batches if self.ahead is None else self.ahead.watch(batches)

    def begin_step(self, step: int) -> None:
        if self.ahead is not None:
            self.ahead.run(self._watch.beat)
        self._watch.beat()
        self.recording.begin_step(step)

    def evaluate(self, state: TrainState) -> Evaluation:
        """Evaluate the model and its averages on the evaluation split, and on further sets."""
        answers = Correctness(self.parts.task, self.runtime, *describe_split(self.job))
        evaluation = self._evaluate(answers, state.eval_model)
        for name, average in state.averages.items():
            if name in ("ema", PAST):
                continue  # the first one is evaluated above, and the past is no average
            # Its hits are computed and dropped, so that the graph is the same.
            extra = self._evaluate(Correctness(self.parts.task, self.runtime), average).metrics
            evaluation.metrics.update({f"{name}/{key}": value for key, value in extra.items()})
        # As the loop decides it after this.
        is_best = state.best_score is None or evaluation.score > state.best_score
        hits = answers.gather(state.step)
        self.recording.note_hits(hits, is_best=evaluation.is_finite and is_best)
        self.recording.gather_numbers()
        return add_further_sets(evaluation, self.runtime, self.parts, self._watch.follow)

    def _evaluate(self, answers: Correctness, model: nn.Module) -> Evaluation:
        return answers.evaluate(model, self._watch.follow(self.parts.eval_loader.batches()))

    def write(self, step: int, kind: str, scalars: dict[str, float]) -> None:
        """Write and show a line of metrics; errors of the checkpoint thread are raised here."""
        self._watch.beat()
        self.stopping.require_run()
        if self.runtime.ranks.size == 1:
            self.saving.manager.check()  # several ranks do this together: should_stop, save
        line = {**scalars, **self.parts.train_loader.counters}
        if kind == TRAIN:
            line["checkpoint_held_s"] = self.saving.manager.pop_blocked_s()
        self.recording.write(step, kind, scalars, line)

    def save(self, state: TrainState, best: bool) -> None:
        self.saving.save(state, best)

    def should_stop(self, step: int) -> bool:
        if not self.stopping.is_due(step):
            return False
        self.saving.check()
        return self.stopping.is_asked(step)

    def roll_back(self, state: TrainState, bad_step: int) -> bool:
        return self.saving.roll_back(state, bad_step)
