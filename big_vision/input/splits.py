"""TFDS split expressions: `train[:99%]`, `train[10:20]+validation`, as ranges of examples."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from utils.errors import UserError, get_hint

_TERM = re.compile(
    r"^\s*(?P<name>[\w.*?{},/-]+?)\s*(\[(?P<start>[^:\]]*):(?P<stop>[^:\]]*)\])?\s*$"
)
_BOUNDARY = re.compile(r"^(?P<number>-?\d+)(?P<unit>%|shard)?$")
ALL = "all"


@dataclass(frozen=True)
class SplitRange:
    """Examples [start, stop) of one stored split."""

    name: str
    start: int
    stop: int


def parse_split(
    expression: str,
    shard_lengths: Mapping[str, Sequence[int]],
    key: str = "data.train_split",
    find_hint: Callable[[str], str] | None = None,
) -> list[SplitRange]:
    """Return the ranges of a split expression, in its order.

    Percentages are rounded to the nearest example, as TFDS does by default; `all` is every split.

    Args:
      expression: `name`, `name[a:b]` with a, b absolute, negative, `%` or `shard`; joined by `+`.
      shard_lengths: examples of each file, by split.
      key: configuration key, for errors.
      find_hint: returns the way out for an unknown split; None suggests similar names.
    """
    ranges: list[SplitRange] = []
    for term in expression.split("+"):
        match = _TERM.match(term)
        if match is None:
            raise UserError(
                f"{key} ({expression}) is not a split expression; write train, train[:99%] or "
                "train[:1000]+validation"
            )
        name = match["name"]
        if name == ALL and ALL not in shard_lengths:
            ranges += [SplitRange(n, 0, sum(lengths)) for n, lengths in shard_lengths.items()]
            continue
        if name not in shard_lengths:
            hint = find_hint(name) if find_hint else get_hint(name, shard_lengths)
            text = f"{key} ({expression}): the dataset has no split {name!r}; {hint}"
            raise UserError(text, code="data.unknown_split")
        lengths = shard_lengths[name]
        first = _get_boundary(match["start"], 0, lengths, key)
        stop = _get_boundary(match["stop"], sum(lengths), lengths, key)
        ranges.append(SplitRange(name, first, max(first, stop)))
    if sum(r.stop - r.start for r in ranges) == 0:
        raise UserError(f"{key} ({expression}) selects no example; widen the slice")
    return ranges


def _get_boundary(text: str | None, default: int, lengths: Sequence[int], key: str) -> int:
    """Return a position in [0, total]; positions beyond the split are an error, as in TFDS."""
    if text is None or not text.strip():
        return default
    total = sum(lengths)
    match = _BOUNDARY.match(text.strip().replace("_", ""))
    if match is None:
        raise UserError(
            f"{key}: {text!r} is not a boundary of a slice; write 1000, -1000, 99% or 3shard"
        )
    number = int(match["number"])
    limit = {"%": 100, "shard": len(lengths), None: total}[match["unit"]]
    if abs(number) > limit:
        raise UserError(
            f"{key}: boundary {text.strip()} lies outside the split ({limit}); lower it"
        )
    number = number + limit if number < 0 else number
    if match["unit"] == "%":
        return round(number * total / 100)
    if match["unit"] == "shard":
        return sum(lengths[:number])
    return number
