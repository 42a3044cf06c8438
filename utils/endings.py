"""Why a run ends before its last step, and what a score that no longer rises leads to."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


class NonFiniteError(RuntimeError):
    """A loss or gradient was not finite, first at `step`."""

    def __init__(self, step: int) -> None:
        super().__init__(
            f"the loss or gradient of step {step} was not finite; lower optim.lr, set "
            "optim.max_grad_norm, look at that batch, or skip it by train.on_nonfinite=rollback"
        )
        self.step = step


class NonFiniteEvaluationError(RuntimeError):
    """A model that is evaluated gives answers that are not finite."""


class PreemptedError(RuntimeError):
    """The run was asked to end and has saved its state, after `step` steps."""

    def __init__(self, step: int) -> None:
        super().__init__(f"asked to end; step {step} is saved")
        self.step = step


@dataclass(frozen=True)
class Waited:
    """How long a run has waited for a better score; a checkpoint holds it.

    Args:
      score: that a better one must exceed; none before the first evaluation that was finite.
      evaluations: in a row that were no better.
      step: of the last evaluation that was counted.
      cuts: of the learning rate so far.
      plateau_score: as `score`, for the next cut.
      plateau_evaluations: in a row that were no better, since the last cut.
    """

    score: float | None = None
    evaluations: int = 0
    step: int = 0
    cuts: int = 0
    plateau_score: float | None = None
    plateau_evaluations: int = 0


@dataclass(frozen=True)
class Plateau:
    """Cuts the learning rate after `patience` evaluations in a row without a better score.

    Args:
      patience: 0: it is never cut.
      min_delta: by how much a score must exceed the one before it to count as better.
      first_step: of those whose evaluations count: the warm-up's do not.
    """

    patience: int = 0
    min_delta: float = 0.0
    first_step: int = 0

    def count(self, waited: Waited, step: int, score: float) -> Waited:
        """What an evaluation that is counted leaves behind."""
        if not self.patience or step <= self.first_step:
            return waited
        if _is_better(score, waited.plateau_score, self.min_delta):
            return replace(waited, plateau_score=score, plateau_evaluations=0)
        if waited.plateau_evaluations + 1 < self.patience:
            return replace(waited, plateau_evaluations=waited.plateau_evaluations + 1)
        return replace(waited, cuts=waited.cuts + 1, plateau_evaluations=0)


@dataclass(frozen=True)
class EarlyStop:
    """Ends a run after `patience` evaluations in a row without a score better by `min_delta`.

    Args:
      patience: 0: the run never ends early.
      plateau: what fewer evaluations may lead to before.
    """

    patience: int = 0
    min_delta: float = 0.0
    plateau: Plateau = Plateau()

    def count(self, waited: Waited, step: int, score: float) -> Waited:
        """What the evaluation after a step leaves behind.

        It counts once, however often it is made: a run that goes on from a checkpoint of that very
        step evaluates again. It counts with a patience of 0, too, which a resume may change.
        """
        if step <= waited.step:
            return waited
        waited = replace(self.plateau.count(waited, step, score), step=step)
        if _is_better(score, waited.score, self.min_delta):
            return replace(waited, score=score, evaluations=0)
        return replace(waited, evaluations=waited.evaluations + 1)

    def is_over(self, waited: Waited) -> bool:
        """Whether patience is at its end."""
        return 0 < self.patience <= waited.evaluations

    def describe(self, waited: Waited) -> str:
        """Why the run ends, for a person."""
        if waited.score is None:
            return f"none of {waited.evaluations} evaluations was finite"
        return (
            f"{waited.evaluations} evaluations in a row gave no score above {waited.score:.4f}"
            f"{f' by more than {self.min_delta:g}' if self.min_delta else ''} "
            f"(train.early_stop_patience={self.patience})"
        )


def _is_better(score: float, best: float | None, min_delta: float) -> bool:
    limit = -math.inf if best is None else best + min_delta
    return math.isfinite(score) and score > limit
