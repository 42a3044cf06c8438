"""Where two runs that should be equal part: the first line and number, by bits."""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from operator import itemgetter
from pathlib import Path

from pydantic_core import from_json

from store.quality.field_types import fit_line
from store.query.record import RunRecord
from store.record.catalogue import METRICS
from store.record.history import METRICS_FILE, Line, modernise
from utils.json_types import JsonValue
from utils.storage.folder import COMMIT_FILE
from utils.storage.local import LocalFolder

_SIGN = 1 << 63
_SIGN32 = 1 << 31
# Bytes of a history that are parsed at once.
_CHUNK = 1 << 18


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
    base: JsonValue
    new: JsonValue
    ulps: int | None
    ulps32: int | None
    others: tuple[str, ...]
    lines: int


def find_divergence(base: Iterable[Line], new: Iterable[Line]) -> Divergence | None:
    """The first line whose deterministic numbers differ in any bit; none: there is none.

    Clocks and resources are left out, and so is the attempt: the histories of an unbroken run and
    of one that was killed and went on are equal.
    """
    order: list[str] = []
    names: list[str] = []
    pick = _pick_nothing
    for count, (old, now) in enumerate(zip_longest(base, new)):
        # Most lines are told equal by one comparison of all their numbers, step and kind included.
        if old and now and list(old) == order == list(now):
            numbers = pick(old)
            if numbers == pick(now) and (0.0 not in numbers or not _has_signs(numbers)):
                continue
        if old is None or now is None or (old["step"], old["kind"]) != (now["step"], now["kind"]):
            there = min(
                (one for one in (old, now) if one is not None), key=lambda one: one["step"]
            )  # fmt: skip
            words = ["a line" if one is there else None for one in (old, now)]
            return Divergence(there["step"], there["kind"], "", *words, None, None, (), count)
        if list(old) != order:
            order, names = list(old), _list_deterministic(old)
            pick = itemgetter(*names) if len(names) > 1 else _pick_nothing
        if found := _compare_lines(old, now, names, count):
            return found
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


def _compare_lines(old: Line, now: Line, names: list[str], count: int) -> Divergence | None:
    more = _list_deterministic(name for name in now if name not in old)
    parted = [n for n in (*names, *more) if not _are_equal(old.get(n), now.get(n))]
    if not parted:
        return None
    a, b = old.get(parted[0]), now.get(parted[0])
    return Divergence(
        old["step"], old["kind"], parted[0], a, b, count_ulps(a, b), count_ulps32(a, b),
        tuple(parted[1:]), count,
    )  # fmt: skip


def _pick_nothing(line: Line) -> float:
    return math.nan  # equal to nothing, so that the line is looked at number by number


def _has_signs(numbers: tuple[object, ...]) -> bool:
    """Whether there is a zero that may be -0.0, which is equal to 0.0 but not in its bits."""
    return 0.0 in numbers and any(one == 0.0 and type(one) is float for one in numbers)


def _list_deterministic(names: Iterable[str]) -> list[str]:
    return [n for n in names if n != "attempt" and METRICS.is_deterministic(n)]


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
        while texts := file.readlines(_CHUNK):
            try:
                lines = list(map(from_json, texts))
            except ValueError:
                lines = list(_parse_whole(texts))
            fitted = (
                fit_line(line if "kind" in line else modernise(line))
                for line in lines
                if isinstance(line, dict) and type(line.get("step")) is int
            )
            yield from (line for line in fitted if line is not None)


def _parse_whole(texts: Iterable[bytes]) -> Iterator[object]:
    """The values of lines; torn and damaged ones are left out."""
    for text in texts:
        with contextlib.suppress(ValueError):
            yield from_json(text)


def _list_checkpoints(record: RunRecord) -> list[int]:
    """Steps of checkpoints; of those on a bucket that are whole."""
    folder = record.checkpoints
    found = {
        int(name.removeprefix("step_")): name
        for name in folder.list_names()
        if name.startswith("step_") and name.removeprefix("step_").isdecimal()
    }
    if isinstance(folder, LocalFolder):
        return list(found)
    return [step for step, name in found.items() if COMMIT_FILE in folder.child(name).list_names()]
