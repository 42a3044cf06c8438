"""`SweepControl`: submits what is missing of a sweep and sees it through."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from service.checker import Checker
from service.jobs.dispatcher import Dispatcher, DispatcherBusyError
from service.jobs.files import JobQueue
from service.jobs.starters import ColdStarter
from service.jobs.state import ENDS
from service.sweeps.plan import (
    Trial,
    check_sweep,
    keep_sweep,
    make_submission,
    make_trial,
    resolve_base,
)
from service.sweeps.report import MISSING, TrialState, list_trials
from service.sweeps.spec import SweepSpec
from service.sweeps.study import ask_point, check_optuna
from utils.errors import UserError
from utils.log import get_logger

# Between two looks at a sweep that another dispatcher works on.
_LOOK_EVERY_S = 1.0
Tell = Callable[[TrialState], None]


class SweepControl:
    """One sweep of a store; it keeps nothing that the files do not say.

    Args:
      tell: is told of each trial whose state has changed.
      width: trials that Optuna may have open at once.

    Raises:
      UserError: the configuration is refused, or another sweep of this name has begun otherwise.
    """

    def __init__(
        self, queue: JobQueue, spec: SweepSpec, who: str, *, tell: Tell, width: int = 1
    ) -> None:
        if spec.method == "optuna":
            check_optuna()
        self.queue, self.spec, self.who = queue, spec, who
        self._tell, self._width = tell, width
        self._known: dict[str, str] = {}
        self.base = resolve_base(spec)
        check_sweep(queue.store, spec, self.base)

    def list(self) -> list[TrialState]:
        """All trials as they stand."""
        return list_trials(self.queue, self.spec, self.base.run.experiment)

    def list_due(self) -> list[Trial]:
        """Trials that `begin` starts: neither complete nor on their way; of Optuna the first."""
        states = self.list()
        if self.spec.method == "optuna" and not states:
            point = ask_point(self.spec, [])
            return [make_trial(self.spec, point, seed) for seed in self.spec.seeds or [None]]
        return [one.trial for one in states if one.state in (MISSING, "failed", "stopped")]

    def check(self, checker: Checker, trials: Sequence[Trial]) -> None:
        """Ask of each trial what `main.py --check` would say, before the first one runs.

        Raises:
          UserError: one is refused; names it.
        """
        for number, trial in enumerate(trials, 1):
            verdict = checker.check(make_submission(self.spec, trial), self.queue.store)
            if verdict.error:
                raise UserError(
                    f"trial {number} of {len(trials)} ({trial.describe()}): {verdict.error}"
                )

    def begin(self) -> None:
        """Keep the sweep's file, submit what was never submitted, and reopen what did not end well.

        Raises:
          UserError: as the constructor.
        """
        keep_sweep(self.queue.store, self.spec, self.base)
        for one in self.list():
            if one.state == MISSING:
                self._submit(one.trial)
            elif one.state in ("failed", "stopped"):
                self.queue.reopen(one.job_id, self.who)

    def run(self, slots: Sequence[str], starter: ColdStarter | None = None) -> list[TrialState]:
        """Work on the queue until every trial has ended; gives them.

        Where another dispatcher works on it, this one watches, and takes its place when it ends.

        Args:
          starter: as of `Dispatcher`.
        """
        is_told = False
        while True:
            try:
                with Dispatcher(self.queue, slots, starter=starter) as dispatcher:
                    dispatcher.run(self.look)
                return self.list()
            except DispatcherBusyError:
                if not is_told:
                    get_logger().info(
                        "another dispatcher works on %s: its slots count", self.queue.folder
                    )
                is_told = True
                if self.look():
                    return self.list()
                time.sleep(_LOOK_EVERY_S)

    def look(self) -> bool:
        """Tell what has changed, and ask Optuna for more; whether the sweep is over."""
        states = self.list()
        for one in states:
            if self._known.get(one.trial.id) != one.state:
                self._known[one.trial.id] = one.state
                self._tell(one)
        if self.spec.method == "optuna" and self._ask_for_more(states):
            return False
        return all(one.state in ENDS for one in states)

    def stop(self) -> None:
        """Ask every trial that has not ended to save and end."""
        for one in self.list():
            if one.job_id and one.state not in ENDS:
                self.queue.stop(one.job_id, self.who)

    def _ask_for_more(self, states: Sequence[TrialState]) -> bool:
        """Submit the next point where fewer run than may at once; whether one was submitted."""
        points = {tuple(map(str, one.trial.point.values())) for one in states}
        open_trials = sum(one.state not in ENDS for one in states)
        if len(points) >= self.spec.trials or open_trials >= self._width:
            return False
        point = ask_point(self.spec, states)
        if point is None:
            return False
        for seed in self.spec.seeds or [None]:
            self._submit(make_trial(self.spec, point, seed))
        return True

    def _submit(self, trial: Trial) -> None:
        self.queue.submit(make_submission(self.spec, trial), self.who)
