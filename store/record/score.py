"""The score of a run: the one number by which its task chooses the best checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from store.record.catalogue import EVAL, METRICS
from utils.json_types import JsonValue

# Keys that filters, sort and show may name beside facts, configurations and numbers; `score` alone
# is a number of a run's end, which is negated where lower is better.
SCORE, SCORE_NAME = "score.value", "score.name"
# The key of the configuration that names a probe as the score of a label-free student.
SCORE_PROBE = "distill.score"
# What evaluations of the built-in tasks are scored by; the first one that a run has is its score.
SCORES = ("top1", "map", "distil_loss", "mse", "loss")


@dataclass(frozen=True)
class Score:
    """A number of a run's last evaluation.

    Attributes:
      name: as filters know it, such as eval.top1.
    """

    name: str
    value: float


def choose_score(values: Mapping[str, float], probe: JsonValue = "") -> Score | None:
    """Choose the score among a run's newest numbers; None before its first evaluation.

    Args:
      values: by the names that filters know.
      probe: value of `distill.score`.
    """
    names = [f"{EVAL}.{name}" for name in ((probe,) if isinstance(probe, str) and probe else ())]
    names += [f"{EVAL}.{name}" for name in SCORES]
    found = next((name for name in names if name in values), None)
    if found is None:
        found = next(iter(_rank_others(values)), None)
    return None if found is None else Score(found, values[found])


def is_candidate(name: str) -> bool:
    """Whether a number may be the score of a run: an evaluation's, with a better direction."""
    metric = METRICS.find(name.removeprefix(f"{EVAL}.")) if name.startswith(f"{EVAL}.") else None
    return metric is not None and metric.direction != "none"


def get_sign(name: str) -> float:
    """1 where higher is better, else -1."""
    metric = METRICS.find(name.partition(".")[2])
    return -1.0 if metric is not None and metric.direction == "lower" else 1.0


def _rank_others(values: Mapping[str, float]) -> list[str]:
    """Numbers of a task from outside, in the catalogue's order."""
    order = {f"{EVAL}.{metric.name}": place for place, metric in enumerate(METRICS)}
    known = [name for name in values if name in order and is_candidate(name)]
    return sorted(known, key=order.__getitem__)
