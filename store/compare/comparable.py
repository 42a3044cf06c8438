"""Which numbers of two sides may be held against each other, and one line on the others."""

from __future__ import annotations

from collections.abc import Sequence

from store.compare.sides import Side
from store.formatting import name_few

_TASK, _FIRST_TASK = "train.task", "classify"


def get_tasks(side: Side) -> list[str]:
    """The tasks that the runs of a side learn; runs of earlier programs learnt one alone."""
    return sorted({str(one.config.get(_TASK) or _FIRST_TASK) for one in side.records})


def learn_apart(base: Side, new: Side) -> bool:
    """Whether two sides have no task in common."""
    return not set(get_tasks(base)) & set(get_tasks(new))


def describe_apart(base: Side, sides: Sequence[Side]) -> str:
    """One line on sides that learn other tasks than the base."""
    names = name_few([f"{side.name} ({', '.join(get_tasks(side))})" for side in sides])
    return (
        f"{names} and {base.name} ({', '.join(get_tasks(base))}) learn different tasks: "
        "their numbers cannot be compared"
    )


def choose_comparable(base: Side, new: Side, metrics: Sequence[str]) -> tuple[list[str], str]:
    """Choose the numbers that both sides have and that mean the same on both.

    Runs of different tasks share the names of some numbers, such as `eval.loss`, and not their
    meaning; what was measured on a set of `data.evals` has one meaning for all of them.

    Returns:
      Their names, and one line on the others; empty if there are no others.
    """
    owners = {metric: _find_owners((base, new), metric) for metric in metrics}
    shared = [metric for metric, sides in owners.items() if len(sides) == 2]
    if learn_apart(base, new):
        kept = [metric for metric in shared if "/" in metric]
        return kept, describe_apart(base, [new]) + (" but for those of the same sets" * bool(kept))
    lines = []
    for side in (base, new):
        names = [metric for metric, sides in owners.items() if sides == [side]]
        if names:
            lines.append(f"only {side.name} has {name_few(names)}")
    return shared, "; ".join(lines)


def _find_owners(sides: Sequence[Side], metric: str) -> list[Side]:
    """The sides of which a run has the number, finite or not."""
    return [side for side in sides if any(metric in one.values for one in side.records)]
