"""Computes the mean of several models' weights."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from models.factory import export_model
from tools.average.scoring import RunScorer
from utils.checkpoint.find import iterate_checkpoints
from utils.errors import UserError
from utils.json_types import make_finite
from utils.programs import prepare_folder
from utils.storage.json_files import write_json
from utils.weights.opening import open_weights
from utils.weights.source import Weights

if TYPE_CHECKING:
    from torch import Tensor

_KEY = "RUN"
REPORT = "average.json"
# Facts of weights that must be equal; the number of heads, for example, is in no tensor's shape.
_EQUAL = ("model", "args", "num_classes", "classes", "mean", "std", "scores")
Tensors = Mapping[str, "Tensor"]


@dataclass
class Member:
    """One of the models that are averaged."""

    weights: Weights
    score: float | None = None  # until it is computed
    is_taken: bool = True


def average(options: argparse.Namespace) -> None:
    """Average, and write an export that every program takes as WEIGHTS."""
    decay = _check_flags(options)
    members = open_members(options.runs)
    prepare_folder(options.out, "--out")
    score = None
    if options.method == "greedy":
        with RunScorer(members[0].weights.location, options.rest) as scorer:
            tensors, score = select_greedily(members, scorer.score)
    else:
        shares = [1.0] * len(members)
        if options.method == "ema":
            shares = get_ema_shares(len(members), decay)
        tensors = mix([member.weights.read_tensors() for member in members], shares)
    export_model(tensors, members[0].weights.facts, options.out)
    rows = [
        {"place": member.weights.location, "score": member.score, "taken": member.is_taken}
        for member in members
    ]
    report = {"method": options.method, "decay": decay if options.method == "ema" else None}
    report |= {"members": rows, "score": score}
    write_json(options.out / REPORT, make_finite(report))
    for row in rows:
        text = "" if row["score"] is None else f", score {row['score']:.4f}"
        print(f"{'taken' if row['taken'] else 'left out'}: {row['place']}{text}")
    text = "" if score is None else f", score {score:.4f}"
    print(f"{options.out}: the mean of {sum(row['taken'] for row in rows)} models{text}")


def open_members(locations: Sequence[str]) -> list[Member]:
    """Open the models of several locations, or of all checkpoints of a single one.

    Raises:
      UserError: fewer than two, or they differ in architecture, head, input or classes.
    """
    if len(locations) == 1:
        checkpoints = [str(folder) for folder in iterate_checkpoints(locations[0])]
        locations = checkpoints[::-1] or locations
    if len(locations) < 2:
        raise UserError(
            f"{_KEY} ({locations[0]!r}) is one model alone; give several, or a run that has kept "
            "several checkpoints (train.keep_checkpoints)"
        )
    members = [Member(open_weights(location, _KEY)) for location in locations]
    first = members[0].weights
    for other in (member.weights for member in members[1:]):
        for name in {**first.kinds, **other.kinds}:
            if first.kinds.get(name) != other.kinds.get(name):
                raise UserError(
                    f"{_KEY} ({other.path!r}) is of another model than {first.path!r}: {name} "
                    "differs; average runs of one model"
                )
        for name in _EQUAL:
            pair = tuple(_drop_rates(dict(weights.facts).get(name)) for weights in (first, other))
            if None not in pair and pair[0] != pair[1]:
                raise UserError(
                    f"{_KEY} ({other.path!r}) is of another {name} than {first.path!r}: "
                    f"{pair[1]!r}, not {pair[0]!r}; average runs of one model"
                )
    return members


def _drop_rates(fact: object) -> object:
    """Remove rates of dropout, which affect training only, from a model's arguments."""
    if not isinstance(fact, dict):
        return fact
    return {name: value for name, value in fact.items() if not name.endswith("_rate")}


def mix(models: Sequence[Tensors], shares: Sequence[float]) -> dict[str, Tensor]:
    """Compute the mean of tensors in float64; integers are those of the last model.

    Args:
      shares: of any sum but 0.
    """
    total = sum(shares)
    mean = dict(models[-1])
    for name, value in mean.items():
        if value.is_floating_point():
            pairs = zip(models, shares, strict=True)
            parts = (share / total * model[name].double() for model, share in pairs)
            mixed: Any = sum(parts)
            mean[name] = mixed.to(value.dtype)
    return mean


def get_ema_shares(count: int, decay: float) -> list[float]:
    """Compute the shares of a mean that starts as the first and moves by 1 - decay to each next."""
    later = [(1 - decay) * decay ** (count - 1 - number) for number in range(1, count)]
    return [decay ** (count - 1), *later]


def select_greedily(
    members: Sequence[Member], score: Callable[[Tensors], float]
) -> tuple[dict[str, Tensor], float]:
    """Compute the mean of those that do not lower its score; sets the members' scores.

    Args:
      score: of weights, higher is better.

    Source: Wortsman et al. 2022, arXiv:2203.05482, algorithm 1.
    """
    scores = [score(member.weights.read_tensors()) for member in members]
    for member, own in zip(members, scores, strict=True):
        member.score, member.is_taken = own, False
    order = sorted(zip(scores, members, strict=True), key=lambda pair: -pair[0])
    (best_score, first), *others = order
    first.is_taken = True
    taken = [first.weights.read_tensors()]
    best = dict(taken[0])
    for _, member in others:
        tried = [*taken, member.weights.read_tensors()]
        mean = mix(tried, [1.0] * len(tried))
        mean_score = score(mean)
        if mean_score >= best_score:
            taken, best, best_score, member.is_taken = tried, mean, mean_score, True
    return best, best_score


def _check_flags(options: argparse.Namespace) -> float:
    """Refuse flags without effect; return the decay."""
    method = options.method
    if options.rest and method != "greedy":
        raise UserError(
            f"{options.rest[0]} is not supported with --method {method}, which evaluates nothing; "
            "remove it"
        )
    if options.decay is not None and method != "ema":
        raise UserError(f"--decay is not supported with --method {method}; remove it")
    decay = 0.9 if options.decay is None else options.decay
    if not 0 < decay < 1:
        raise UserError(f"--decay ({decay:g}) must lie between 0 and 1; change it")
    return decay
