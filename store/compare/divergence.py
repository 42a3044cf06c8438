"""Where two runs that should be equal part: the first line and number, by bits."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path

from pydantic_core import from_json

from store.catalogue import METRICS
from store.history import METRICS_FILE, Line, modernise
from store.record import RunRecord
from utils.storage import LocalFolder

_SIGN = 1 << 63
_SIGN32 = 1 << 31


@dataclass(frozen=True)
class Divergence:
    """The first place at which two histories differ.

    Attributes:
      step, kind: of the line.
      metric: the first number of the line that differs; empty: a line is missing on one side.
      base, new: its values; none: not there, or not finite as `nonfinite` says.
      ulps: how many double-precision numbers lie between them; none: one is no finite number.
      ulps32: the same in single precision, in which most metrics are computed; none: they are not
        numbers of single precision.
      others: further numbers of that line that differ.
      lines: whole lines before it that are equal.
    """

    step: int
    kind: str
    metric: str
    base: object
    new: object
    ulps: int | None
    ulps32: int | None
    others: tuple[str, ...]
    lines: int


def find_divergence(base: Iterable[Line], new: Iterable[Line]) -> Divergence | None:
    """The first line whose deterministic numbers differ in any bit; none: there is none.

    Clocks and resources are left out, and so is the attempt: the histories of an unbroken run and
    of one that was killed and went on are equal.
    """
    is_kept = cache(lambda name: name != "attempt" and METRICS.is_deterministic(name))
    for count, (old, now) in enumerate(zip_longest(base, new)):
        if old is None or now is None or (old["step"], old["kind"]) != (now["step"], now["kind"]):
            there = min(
                (one for one in (old, now) if one is not None), key=lambda one: one["step"]
            )  # fmt: skip
            words = ["a line" if one is there else None for one in (old, now)]
            return Divergence(there["step"], there["kind"], "", *words, None, None, (), count)
        if names := _compare_lines(old, now, is_kept):
            first, *others = names
            a, b = old.get(first), now.get(first)
            return Divergence(
                old["step"], old["kind"], first, a, b, count_ulps(a, b), count_ulps32(a, b),
                tuple(others), count,
            )  # fmt: skip
    return None


def read_lines(record: RunRecord) -> Iterator[Line]:
    """The whole lines of a run's history one by one, so that a million of them need no memory."""
    path = record.folder.path / METRICS_FILE if isinstance(record.folder, LocalFolder) else None
    if path is None or not path.is_file():
        yield from record.lines
        return
    yield from _stream(path)


def find_checkpoint(records: Iterable[RunRecord], step: int) -> int | None:
    """The last step before a divergence at which all runs have a checkpoint; none: no such step."""
    steps = [{found for found in _list_checkpoints(record) if found < step} for record in records]
    common = set.intersection(*steps) if steps else set()
    return max(common, default=None)


def count_ulps(base: object, new: object) -> int | None:
    """How many steps of the last bit two doubles are apart; none: no finite numbers."""
    if not _are_finite(base, new):
        return None
    return abs(_order(float(base), "d", "q", _SIGN) - _order(float(new), "d", "q", _SIGN))


def count_ulps32(base: object, new: object) -> int | None:
    """The same of single precision; none: they are no numbers of it."""
    if not _are_finite(base, new):
        return None
    for value in (base, new):
        if abs(float(value)) > 3.4028234663852886e38:
            return None
        if struct.unpack("f", struct.pack("f", float(value)))[0] != float(value):
            return None
    return abs(_order(float(base), "f", "i", _SIGN32) - _order(float(new), "f", "i", _SIGN32))


def _compare_lines(old: Line, now: Line, is_kept: Callable[[str], bool]) -> list[str]:
    names = old if old.keys() == now.keys() else [*old, *(name for name in now if name not in old)]
    return [n for n in names if not _are_equal(old.get(n), now.get(n)) and is_kept(n)]


def _are_equal(a: object, b: object) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        is_same = a == b and math.copysign(1.0, a) == math.copysign(1.0, b)
        return is_same or (math.isnan(a) and math.isnan(b))
    return a == b


def _are_finite(*values: object) -> bool:
    return all(
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        for value in values
    )


def _order(value: float, kind: str, integer: str, sign: int) -> int:
    """The number's place among all numbers of its precision."""
    bits = struct.unpack(integer, struct.pack(kind, value))[0]
    return bits if bits >= 0 else -(bits + sign)


def _stream(path: Path) -> Iterator[Line]:
    with path.open("rb") as file:
        for text in file:
            try:
                line = from_json(text)
            except ValueError:
                continue
            if isinstance(line, dict) and type(line.get("step")) is int:
                yield modernise(line)


def _list_checkpoints(record: RunRecord) -> list[int]:
    names = record.folder.child("checkpoints").list_names()
    steps = (name.removeprefix("step_") for name in names if name.startswith("step_"))
    return [int(step) for step in steps if step.isdecimal()]
