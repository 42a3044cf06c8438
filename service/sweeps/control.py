"""`SweepControl`: submits the missing trials of a sweep and works until all have ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from service.checker import Checker, Verdict
from service.jobs.dispatcher import Dispatcher, DispatcherBusyError
from service.jobs.files import JobQueue
from service.jobs.starters import ColdStarter
from service.jobs.state import ENDS
from service.sweeps import plan
from service.sweeps.report import MISSING, TrialState, list_trials
from service.sweeps.spec import SweepSpec
from service.sweeps.study import check_optuna, suggest_point
from utils.errors import UserError
from utils.log import get_logger

# Pause between two looks at a sweep that another dispatcher works on.
_LOOK_EVERY_S = 1.0
Tell = Callable[[TrialState], None]


class SweepControl:
    """One sweep of a store; its whole state is in the files.

    Args:
      tell: called with each trial whose state has changed.
      width: trials of Optuna that may be open at once.

    Raises:
      UserError: the configuration is refused, or a sweep of this name has begun with other values.
    """

    def __init__(
        self, queue: JobQueue, spec: SweepSpec, who: str, *, tell: Tell, width: int = 1
    ) -> None:
        if spec.method == "optuna":
            check_optuna()
        self.queue, self.spec, self.who = queue, spec, who
        self._tell, self._width = tell, width
        self._known: dict[str, str] = {}
        self.base = plan.resolve_base(spec)
        plan.check_sweep(queue.store, spec, self.base)

    def list(self) -> list[TrialState]:
        """List all trials with their states."""
        return list_trials(self.queue, self.spec, self.base.run.experiment)

    def list_due(self) -> Sequence[plan.Trial]:
        """List trials that `begin` starts: neither complete nor queued; with Optuna the first."""
        states = self.list()
        if self.spec.method == "optuna" and not states:
            point = suggest_point(self.spec, [])
            assert point is not None  # the first is always new
            return [plan.make_trial(self.spec, point, seed) for seed in self.spec.seeds or [None]]
        return [state.trial for state in states if state.state in (MISSING, "failed", "stopped")]

    def check(self, checker: Checker, trials: Sequence[plan.Trial]) -> Sequence[Verdict]:
        """Check each trial as `main.py --check` does; UserError for the first that is refused."""
        verdicts = []
        for number, trial in enumerate(trials, 1):
            verdict = checker.check(plan.make_submission(self.spec, trial), self.queue.store)
            verdicts.append(verdict)
            if verdict.error:
                name = f"trial {number} of {len(trials)} ({trial.describe()})"
                raise UserError(f"{name}: {verdict.error}")
        return verdicts

    def begin(self) -> None:
        """Store the sweep's file, submit missing trials, and reopen failed or stopped ones."""
        plan.keep_sweep(self.queue.store, self.spec, self.base)
        for state in self.list():
            if state.state == MISSING:
                self._submit(state.trial)
            elif state.state in ("failed", "stopped"):
                self.queue.reopen(state.job_id, self.who)

    def run(self, slots: Sequence[str], starter: ColdStarter | None = None) -> Sequence[TrialState]:
        """Work on the queue until every trial has ended; return the trials.

        While another dispatcher works on it, this one watches, and follows it at its end.
        """
        is_logged = False
        while True:
            try:
                with Dispatcher(self.queue, slots, starter=starter) as dispatcher:
                    dispatcher.run(self.look)
                return self.list()
            except DispatcherBusyError:
                if not is_logged:
                    text = "another dispatcher works on %s: its slots count"
                    get_logger().info(text, self.queue.folder)
                is_logged = True
                if self.look():
                    return self.list()
                time.sleep(_LOOK_EVERY_S)

    def look(self) -> bool:
        """Report changes, and sample further points; return whether the sweep is over."""
        states = self.list()
        for state in states:
            if self._known.get(state.trial.id) != state.state:
                self._known[state.trial.id] = state.state
                self._tell(state)
        if self.spec.method == "optuna" and self._ask_for_more(states):
            return False
        return all(state.state in ENDS for state in states)

    def stop(self) -> None:
        """Request that every trial that has not ended saves and ends."""
        for state in self.list():
            if state.job_id and state.state not in ENDS:
                self.queue.stop(state.job_id, self.who)

    def _ask_for_more(self, states: Sequence[TrialState]) -> bool:
        """Submit the next point if another may run; return whether one was submitted."""
        points = {tuple(map(str, state.trial.point.values())) for state in states}
        open_trials = sum(state.state not in ENDS for state in states)
        if len(points) >= self.spec.trials or open_trials >= self._width:
            return False
        point = suggest_point(self.spec, states)
        if point is None:
            return False
        for seed in self.spec.seeds or [None]:
            self._submit(plan.make_trial(self.spec, point, seed))
        return True

    def _submit(self, trial: plan.Trial) -> None:
        self.queue.submit(plan.make_submission(self.spec, trial), self.who)
