"""Early ends of a run: errors, and scores that stop rising."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


class NonFiniteError(RuntimeError):
    """A loss or gradient was not finite, first at `step`."""

    def __init__(self, step: int) -> None:
        super().__init__(
            f"the loss or gradient of step {step} was not finite; lower optim.lr, set "
            "optim.max_grad_norm, check that batch, or skip it by train.on_nonfinite=rollback"
        )
        self.step = step


class GraphBudgetError(RuntimeError):
    """The run compiled more graphs than `runtime.graph_budget` allows."""


class NonFiniteEvaluationError(RuntimeError):
    """An evaluated model has outputs that are not finite."""


class PreemptedError(RuntimeError):
    """The run has ended on request and has saved its state after `step` steps."""

    def __init__(self, step: int) -> None:
        super().__init__(f"asked to end; step {step} is saved")
        self.step = step


@dataclass(frozen=True)
class Stagnation:
    """Evaluations without a better score so far; checkpoints hold it."""

    score: float | None = None  # best so far; None before the first finite evaluation
    evaluations: int = 0  # in a row without a better score
    step: int = 0  # of the last counted evaluation
    cuts: int = 0  # of the learning rate
    plateau_score: float | None = None  # as `score`, for the next cut
    plateau_evaluations: int = 0  # as `evaluations`, since the last cut


@dataclass(frozen=True)
class Plateau:
    """Cuts the learning rate after `patience` evaluations in a row without a better score."""

    patience: int = 0  # 0: never
    min_delta: float = 0.0  # smallest rise that counts as better
    first_step: int = 0  # evaluations count after it: after the warm-up

    def count(self, waited: Stagnation, step: int, score: float) -> Stagnation:
        """Return the state after an evaluation."""
        if not self.patience or step <= self.first_step:
            return waited
        if _is_better(score, waited.plateau_score, self.min_delta):
            return replace(waited, plateau_score=score, plateau_evaluations=0)
        if waited.plateau_evaluations + 1 < self.patience:
            return replace(waited, plateau_evaluations=waited.plateau_evaluations + 1)
        return replace(waited, cuts=waited.cuts + 1, plateau_evaluations=0)


@dataclass(frozen=True)
class EarlyStop:
    """Ends a run after `patience` evaluations in a row without a score better by `min_delta`."""

    patience: int = 0  # 0: never
    min_delta: float = 0.0
    plateau: Plateau = Plateau()

    def count(self, waited: Stagnation, step: int, score: float) -> Stagnation:
        """Return the state after the evaluation of a step.

        A repeated evaluation counts once, because a resumed run repeats that of its checkpoint. It
        also counts with a patience of 0, which a resume may change.
        """
        if step <= waited.step:
            return waited
        waited = replace(self.plateau.count(waited, step, score), step=step)
        if _is_better(score, waited.score, self.min_delta):
            return replace(waited, score=score, evaluations=0)
        return replace(waited, evaluations=waited.evaluations + 1)

    def is_over(self, waited: Stagnation) -> bool:
        return 0 < self.patience <= waited.evaluations

    def describe(self, waited: Stagnation) -> str:
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
