"""The score of a run: the number by which its task selects the best checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from store.record.catalogue import EVAL, METRICS
from utils.json_types import JsonValue

# Keys for filters, sort and show besides facts, configurations and numbers; `score` alone is a
# number of a run's end, which is negated if lower is better.
SCORE, SCORE_NAME = "score.value", "score.name"
# The configuration key that selects a probe as the score of a label-free student.
SCORE_PROBE = "distill.score"
# Scores of the built-in tasks; the first one that a run has is its score.
SCORES = ("top1", "map", "distil_loss", "mse", "loss")


@dataclass(frozen=True)
class Score:
    """A number of a run's last evaluation, such as eval.top1."""

    name: str
    value: float


def choose_score(values: Mapping[str, float], probe: JsonValue = "") -> Score | None:
    """Choose the score among a run's newest numbers; None before its first evaluation.

    Args:
      values: by their names in filters.
      probe: value of `distill.score`.
    """
    names = [f"{EVAL}.{name}" for name in SCORES]
    if isinstance(probe, str) and probe:
        names.insert(0, f"{EVAL}.{probe}")
    # Then numbers of custom tasks, in the catalogue's order.
    others = filter(is_candidate, (f"{EVAL}.{metric.name}" for metric in METRICS))
    name = next((name for name in itertools.chain(names, others) if name in values), None)
    return None if name is None else Score(name, values[name])


def is_candidate(name: str) -> bool:
    """Return whether a number may be a score: an evaluation's, with a better direction."""
    metric = METRICS.find(name.removeprefix(f"{EVAL}.")) if name.startswith(f"{EVAL}.") else None
    return metric is not None and metric.direction != "none"


def get_sign(name: str) -> float:
    """Return 1 if higher is better, else -1."""
    metric = METRICS.find(name.partition(".")[2])
    return -1.0 if metric is not None and metric.direction == "lower" else 1.0
