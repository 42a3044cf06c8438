"""Where two runs that should be equal part: the first line and number, by bits."""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from operator import itemgetter
from typing import Any, TypeGuard

from pydantic_core import from_json

from store.quality.field_types import fit_line
from store.query.record import RunRecord
from store.record.catalogue import EPOCH, METRICS
from store.record.history import METRICS_FILE, Line, modernise
from utils.json_types import JsonValue
from utils.storage.folder import COMMIT_FILE
from utils.storage.local import LocalFolder

_SIGN = 1 << 63
_SIGN32 = 1 << 31
# Bytes of a history that are parsed together.
_CHUNK = 1 << 18


@dataclass(frozen=True)
class Divergence:
    """The first difference between two histories."""

    # step, kind: of the line
    step: int
    kind: str
    metric: str  # the first number of the line that differs; empty if one side has no such line
    # base, new: its values; None if missing, or not finite according to `nonfinite`
    base: JsonValue
    new: JsonValue
    # how many double-precision numbers lie between them; None if one is not finite
    ulps: int | None
    # the same in single precision, in which most metrics are computed; None if they are no numbers
    # of single precision
    ulps32: int | None
    others: tuple[str, ...]  # further numbers of that line that differ
    lines: int  # whole lines before it that are equal


def find_divergence(base: Iterable[Line], new: Iterable[Line]) -> Divergence | None:
    """Find the first line whose deterministic numbers differ in any bit; None if all are equal.

    Clocks, resources and the attempt are ignored: the histories of an unbroken run and of one that
    was killed and resumed are equal.
    """
    order: list[str] = []
    names: list[str] = []
    pick = _pick_nothing
    for count, (old, now) in enumerate(zip_longest(base, new)):
        # Most lines are found equal by one comparison of all their numbers, step and kind included.
        if old and now and list(old) == order == list(now):
            numbers = pick(old)
            # 0.0 equals -0.0 but not in its bits, so a line with such a zero needs a closer look.
            if numbers == pick(now) and (0.0 not in numbers or not _has_float_zero(numbers)):
                continue
        if old is None or now is None or (old["step"], old["kind"]) != (now["step"], now["kind"]):
            lines = [line for line in (old, now) if line is not None]
            first = min(lines, key=lambda line: line["step"])
            base_line, new_line = ("a line" if line is first else None for line in (old, now))
            return Divergence(
                first["step"], first["kind"], "", base_line, new_line, None, None, (), count
            )
        if list(old) != order:
            order, names = list(old), _list_deterministic(old)
            pick = itemgetter(*names) if len(names) > 1 else _pick_nothing
        more = _list_deterministic(name for name in now if name not in old)
        differing = [n for n in (*names, *more) if not _are_equal(old.get(n), now.get(n))]
        if differing:
            name, *others = differing
            a, b = old.get(name), now.get(name)
            return Divergence(
                old["step"],
                old["kind"],
                name,
                a,
                b,
                count_ulps(a, b),
                count_ulps32(a, b),
                tuple(others),
                count,
            )
    return None


def read_lines(record: RunRecord) -> Iterator[Line]:
    """Yield the whole lines of a run's history, so that a million of them need no memory.

    Lines of epochs are left out: those of training decide them, and older runs have none.
    """
    path = record.folder.path / METRICS_FILE if isinstance(record.folder, LocalFolder) else None
    if path is None or not path.is_file():
        yield from (line for line in record.lines if line["kind"] != EPOCH)
        return
    with path.open("rb") as file:
        while texts := file.readlines(_CHUNK):
            try:
                lines = list(map(from_json, texts))
            except ValueError:  # a torn or damaged line
                lines = list(_parse_whole(texts))
            fitted = (
                fit_line(line if "kind" in line else modernise(line))
                for line in lines
                if isinstance(line, dict) and type(line.get("step")) is int
            )
            yield from (line for line in fitted if line is not None and line["kind"] != EPOCH)


def find_checkpoint(records: Iterable[RunRecord], step: int) -> int | None:
    """Return the last step before this one at which all runs have a checkpoint, or None."""
    steps = [set(_list_checkpoints(record)) for record in records]
    common = set.intersection(*steps) if steps else set()
    return max((other for other in common if other < step), default=None)


def count_ulps(base: object, new: object) -> int | None:
    """Count the steps of the last bit between two doubles; None if they are not finite numbers."""
    if not (_is_finite(base) and _is_finite(new)):
        return None
    return abs(_order(float(base), "d", "q", _SIGN) - _order(float(new), "d", "q", _SIGN))


def count_ulps32(base: object, new: object) -> int | None:
    """Count the same in single precision; None if they are no numbers of it."""
    if not (_is_finite(base) and _is_finite(new)):
        return None
    for value in (base, new):
        if abs(float(value)) > 3.4028234663852886e38:
            return None
        if struct.unpack("f", struct.pack("f", float(value)))[0] != float(value):
            return None
    return abs(_order(float(base), "f", "i", _SIGN32) - _order(float(new), "f", "i", _SIGN32))


def _pick_nothing(line: Line) -> Any:
    return math.nan  # equal to nothing, so that the line is compared number by number


def _has_float_zero(numbers: tuple[object, ...]) -> bool:
    return any(value == 0.0 and type(value) is float for value in numbers)


def _list_deterministic(names: Iterable[str]) -> list[str]:
    return [n for n in names if n != "attempt" and METRICS.is_deterministic(n)]


def _are_equal(a: object, b: object) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        is_same = a == b and math.copysign(1.0, a) == math.copysign(1.0, b)
        return is_same or (math.isnan(a) and math.isnan(b))
    return a == b


def _is_finite(value: object) -> TypeGuard[float]:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def _order(value: float, kind: str, integer: str, sign: int) -> int:
    """Return the number's position among all numbers of its precision."""
    bits = struct.unpack(integer, struct.pack(kind, value))[0]
    return bits if bits >= 0 else -(bits + sign)


def _parse_whole(texts: Iterable[bytes]) -> Iterator[object]:
    for text in texts:
        with contextlib.suppress(ValueError):
            yield from_json(text)


def _list_checkpoints(record: RunRecord) -> list[int]:
    """Return the steps of checkpoints; on a bucket of complete ones."""
    folder = record.checkpoints
    steps = {
        int(name.removeprefix("step_")): name
        for name in folder.list_names()
        if name.startswith("step_") and name.removeprefix("step_").isdecimal()
    }
    if isinstance(folder, LocalFolder):
        return list(steps)
    return [step for step, name in steps.items() if COMMIT_FILE in folder.child(name).list_names()]
