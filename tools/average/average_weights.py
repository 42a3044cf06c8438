"""Computes the mean of several models' weights."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from models.factory import export_model
from tools.average.judgement import RunJudge
from utils.checkpoint.find import iterate_checkpoints
from utils.errors import UserError
from utils.json_types import JsonValue, make_finite
from utils.programs import prepare_folder
from utils.storage.json_files import write_json
from utils.weights.opening import open_weights
from utils.weights.source import Weights

if TYPE_CHECKING:
    from torch import Tensor


_KEY = "RUN"
REPORT = "average.json"
# What weights tell of their model; numbers of heads, say, show in no tensor's shape.
_ALIKE = ("model", "args", "num_classes", "classes", "mean", "std", "scores")
Tensors = Mapping[str, "Tensor"]


@dataclass
class Member:
    """One of the models that are averaged."""

    weights: Weights
    score: float | None = None
    is_taken: bool = True

    @property
    def place(self) -> str:
        """Where its weights lie."""
        return self.weights.location


def average(options: argparse.Namespace) -> int:
    """Average, and write an export that every program takes as WEIGHTS.

    Raises:
      UserError: models that are not alike, or a flag that cannot be used.
    """
    decay = _check_flags(options, options.rest)
    members = open_members(options.runs)
    prepare_folder(options.out, "--out")
    score = None
    if options.method == "greedy":
        with RunJudge(members[0].place, options.rest) as judge:
            tensors, score = pick_greedily(members, judge.score)
    else:
        shares = [1.0] * len(members)
        if options.method == "ema":
            shares = get_ema_shares(len(members), decay)
        tensors = mix([member.weights.read_tensors() for member in members], shares)
    export_model(tensors, members[0].weights.facts, options.out)
    report = {
        "method": options.method,
        "decay": decay if options.method == "ema" else None,
        "members": [{"place": m.place, "score": m.score, "taken": m.is_taken} for m in members],
        "score": score,
    }
    write_json(options.out / REPORT, make_finite(report))
    for member in members:
        told = "" if member.score is None else f", score {member.score:.4f}"
        print(f"{'taken' if member.is_taken else 'left out'}: {member.place}{told}")
    told = "" if score is None else f", score {score:.4f}"
    print(f"{options.out}: the mean of {sum(m.is_taken for m in members)} models{told}")
    return 0


def open_members(places: Sequence[str]) -> list[Member]:
    """The models of several places, or of all checkpoints of a single one; all of one kind.

    Raises:
      UserError: fewer than two, or they are not alike.
    """
    if len(places) == 1:
        found = [str(folder) for folder in iterate_checkpoints(places[0])]
        places = found[::-1] or places
    if len(places) < 2:
        raise UserError(
            f"{_KEY} ({places[0]!r}) is one model alone; give several, or a run that has kept "
            "several checkpoints (train.keep_checkpoints)"
        )
    members = [Member(open_weights(place, _KEY)) for place in places]
    first = members[0].weights
    for other in (member.weights for member in members[1:]):
        odd = [name for name in {**first.kinds, **other.kinds}
               if first.kinds.get(name) != other.kinds.get(name)]  # fmt: skip
        if odd:
            raise UserError(
                f"{_KEY} ({other.path!r}) is of another model than {first.path!r}: {odd[0]} "
                "differs; average runs of one model"
            )
        check_facts(first, other)
    return members


def check_facts(first: Weights, other: Weights) -> None:
    """Refuse models whose tensors fit each other, but which do not mean the same.

    Raises:
      UserError: another architecture, head, input or order of classes, where both tell it.
    """
    for fact in _ALIKE:
        mine, its = (_drop_rates(one.facts.get(fact)) for one in (first, other))
        if mine is not None and its is not None and mine != its:
            raise UserError(
                f"{_KEY} ({other.path!r}) is of another {fact} than {first.path!r}: {its!r}, not "
                f"{mine!r}; average runs of one model"
            )


def _drop_rates(fact: JsonValue) -> JsonValue:
    """A fact without rates of dropout, which concern training alone and may differ in a mean."""
    if not isinstance(fact, dict):
        return fact
    return {name: value for name, value in fact.items() if not name.endswith("_rate")}


def mix(models: Sequence[Tensors], shares: Sequence[float]) -> dict[str, Tensor]:
    """The mean of tensors by share, summed in float64; whole numbers are those of the last model.

    Args:
      shares: of any sum but 0.
    """
    total = sum(shares)
    found = {}
    for name, value in models[-1].items():
        found[name] = value
        if value.is_floating_point():
            parts = (share / total * model[name].double()
                     for model, share in zip(models, shares, strict=True))  # fmt: skip
            found[name] = sum(parts).to(value.dtype)
    return found


def get_ema_shares(count: int, decay: float) -> list[float]:
    """What each counts where the mean begins as the first and moves by 1 - decay at each other."""
    later = [(1 - decay) * decay ** (count - 1 - number) for number in range(1, count)]
    return [decay ** (count - 1), *later]


def pick_greedily(
    members: Sequence[Member], judge: Callable[[Tensors], float]
) -> tuple[dict[str, Tensor], float]:
    """The mean of those that do not make it worse, and its score; members learn their own.

    Args:
      judge: gives a score, higher is better.

    Source: Wortsman et al. 2022, arXiv:2203.05482, algorithm 1.
    """
    for member in members:
        member.score, member.is_taken = judge(member.weights.read_tensors()), False
    order = sorted(members, key=lambda member: -member.score)
    order[0].is_taken = True
    taken = [order[0].weights.read_tensors()]
    best, score = dict(taken[0]), order[0].score
    for member in order[1:]:
        tried = [*taken, member.weights.read_tensors()]
        mean = mix(tried, [1.0] * len(tried))
        found = judge(mean)
        if found >= score:
            taken, best, score, member.is_taken = tried, mean, found, True
    return best, score


def _check_flags(options: argparse.Namespace, flags: Sequence[str]) -> float:
    """Refuse what would do nothing; gives the decay."""
    if flags and options.method != "greedy":
        raise UserError(
            f"{flags[0]} means nothing to --method {options.method}, which judges nothing; leave "
            "it out"
        )
    if options.decay is not None and options.method != "ema":
        raise UserError(f"--decay means nothing to --method {options.method}; leave it out")
    decay = 0.9 if options.decay is None else options.decay
    if not 0 < decay < 1:
        raise UserError(f"--decay ({decay:g}) must lie between 0 and 1; change it")
    return decay
