"""Where the time of a run went, over all its attempts: shares, goodput, and the pieces of a trace.

Goodput is the time of steps that still count over the paid time. Waiting for input, compiling,
evaluating, checkpoints, rollbacks and repeated steps are paid for and not useful; the time between
two attempts is not paid.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from store.formatting import format_least, format_value
from store.query.record import RunRecord
from store.record.catalogue import TRAIN, WAIT_S, find_entry
from store.record.spans import COMPILE, EVALUATION, HELD, ROLLBACK, WINDOW, Span
from utils.json_types import JsonMapping, JsonObject

# Parts of a run's time, in this order; they sum up to all of it.
SHARES = ("step", "input_wait", "compile", "evaluation", "checkpoint", "redone", "other", "down")
# Times of a line in which the loop waited.
_WAITS = (WAIT_S, "checkpoint_held_s")


@dataclass(frozen=True)
class AttemptTime:
    """Time of an attempt, in seconds since 1970; not `is_whole` if its end is only estimated."""

    number: int
    from_step: int
    began: float
    ended: float
    is_whole: bool


@dataclass(frozen=True)
class RunTime:
    """Where the time of a run went."""

    paid_s: float | None  # sum over attempts; None if the start of none is known
    is_least: bool  # an attempt was killed or has no start, so that it may be more
    goodput: float | None  # None if nothing was paid for, or a killed attempt has only lines
    shares_s: dict[str, float]  # seconds by the names of `SHARES`
    # Without spans evaluations and compiling count as steps, and repeated steps as `other`
    has_spans: bool


def compute_time(record: RunRecord) -> RunTime:
    """Compute where the time of a run went so far."""
    attempts = list_attempts(record)
    paid_s, is_least = sum_paid(record, attempts)
    paid = paid_s or 0.0
    has_spans = any(span.name == WINDOW for span in record.spans)
    shares = _share_spans(record.spans, attempts) if has_spans else _share_lines(record)
    shares["other"] = max(0.0, paid - sum(shares.values()))
    shares["down"] = sum(ended - began for began, ended in list_downs(attempts))
    # A killed attempt with lines alone may have been paid for much longer.
    is_known = paid > 0 and (has_spans or not is_least)
    goodput = min(1.0, shares["step"] / paid) if is_known else None
    shares = {name: shares.get(name, 0.0) for name in SHARES}
    return RunTime(paid_s, is_least, goodput, shares, has_spans)


def sum_paid(record: RunRecord, attempts: Sequence[AttemptTime]) -> tuple[float | None, bool]:
    """Return the paid seconds, None if unknown, and whether it may be more; for every display."""
    if not attempts:
        return None, True
    count = max(len(record.attempts), record.facts.attempts or 0)
    is_least = len(attempts) < count or not all(attempt.is_whole for attempt in attempts)
    return math.fsum(attempt.ended - attempt.began for attempt in attempts), is_least


def name_end(record: RunRecord, attempt: JsonObject) -> str:
    """Return how an attempt ended; one without an end was killed if another followed it."""
    if isinstance(attempt.get("status"), str):
        return attempt["status"]
    is_last = attempt is record.attempts[-1]
    return "killed or at work" if is_last and not record.is_complete else "killed"


def describe_steps(record: RunRecord, attempt: JsonObject) -> str:
    """Return the steps of an attempt; those of its lines and spans if it was killed."""
    first, last = attempt.get("from_step", "?"), attempt.get("to_step")
    if last is None:
        number = attempt["attempt"]
        steps = [line["step"] for line in record.lines if get_attempt(record, line) == number]
        steps += [span.step for span in record.spans if span.attempt == number]
        last = f"≥ {max(steps)}" if steps else "?"
    return f"{first} to {last}"


def list_attempts(record: RunRecord) -> list[AttemptTime]:
    """Return when each program worked on the run; a killed one until its last line or span.

    A run from before `attempts.jsonl` has only a start and an end, which are those of its attempt
    if there was one; the pauses between several are unknown.
    """
    if not record.attempts:
        began, ended = record.facts.started, record.facts.ended
        if began is None or ended is None or (record.facts.attempts or 1) != 1:
            return []
        return [AttemptTime(1, 0, began, max(began, ended), is_whole=True)]
    attempts = []
    for line in record.attempts:
        began, ended, number = line.get("began"), line.get("ended"), line.get("attempt")
        if not isinstance(began, int | float) or not isinstance(number, int):
            continue
        is_whole = isinstance(ended, int | float)
        if not is_whole:
            ends = [span.ended for span in record.spans if span.attempt == number]
            ended = max(ends) if ends else began + _measure_lines(record, number)
        from_step = line.get("from_step")
        from_step = from_step if isinstance(from_step, int) else 0
        attempts.append(AttemptTime(number, from_step, began, max(began, ended), is_whole))
    return attempts


def get_attempt(record: RunRecord, line: JsonMapping) -> Any:
    """Return the attempt of a line; without attempts, the only one of `list_attempts`."""
    return line.get("attempt") if record.attempts else 1


def list_downs(attempts: Sequence[AttemptTime]) -> list[tuple[float, float]]:
    """Return the pauses between the attempts of a run."""
    pairs = ((first.ended, second.began) for first, second in itertools.pairwise(attempts))
    return [(ended, began) for ended, began in pairs if began > ended]


def make_windows(record: RunRecord, attempts: Sequence[AttemptTime]) -> list[Span]:
    """Return the windows of a run, else those of its lines, from the first step on."""
    windows = [span for span in record.spans if span.name == WINDOW]
    if windows:
        return windows
    began = {attempt.number: attempt.began for attempt in attempts}
    last_s = last_step = attempt_s = attempt = 0
    for line in record.lines:
        number, time_s = get_attempt(record, line), line.get("time_s")
        if line["kind"] != TRAIN or not isinstance(time_s, int | float) or number not in began:
            continue
        if number != attempt:
            attempt, attempt_s = number, last_s
        waits = sum(line.get(name) or 0.0 for name in _WAITS)
        wait_s, duration = line.get(WAIT_S) or 0.0, max(0.0, time_s - last_s)
        start = began[number] + last_s - attempt_s
        steps, step_s = max(0, line["step"] - last_step), max(0.0, duration - waits)
        span = Span(WINDOW, line["step"], start, duration, 0, number, steps, step_s, wait_s)
        windows.append(span)
        last_s, last_step = time_s, line["step"]
    return windows


@dataclass
class _Piece:
    """Steps after `low` up to `high`, of which some may be done again."""

    low: int
    high: int
    step_s: float
    wait_s: float

    def cut(self, step: int) -> float:
        """Drop the steps after this one; return their seconds."""
        if self.high <= step:
            return 0.0
        share = (self.high - max(self.low, step)) / max(1, self.high - self.low)
        lost = share * (self.step_s + self.wait_s)
        self.step_s, self.wait_s = (1 - share) * self.step_s, (1 - share) * self.wait_s
        self.high = max(self.low, step)
        return lost


def _share_spans(spans: Sequence[Span], attempts: Sequence[AttemptTime]) -> dict[str, float]:
    pieces: list[_Piece] = []
    shares = dict.fromkeys(SHARES, 0.0)
    for attempt in attempts:
        own = [span for span in spans if span.attempt == attempt.number and span.rank == 0]
        shares["redone"] += sum(piece.cut(attempt.from_step) for piece in pieces)
        evaluations = [span for span in own if span.name == EVALUATION]
        compiles = [span for span in own if span.name == COMPILE]
        inner = [span for span in compiles if _begins_within(span, evaluations)]
        outer = [span for span in compiles if not _begins_within(span, evaluations)]
        for span in own:
            if span.name == WINDOW:
                # Compiling that began within a window is no time of its steps.
                compile_s = sum(c.duration_s for c in outer if _begins_within(c, [span]))
                step_s = max(0.0, span.step_s - compile_s)
                low = span.step - max(1, span.count)
                pieces.append(_Piece(low, span.step, step_s, span.input_wait_s))
            elif span.name == ROLLBACK:
                shares["redone"] += span.duration_s
                shares["redone"] += sum(piece.cut(span.step) for piece in pieces)
            elif span.name in (COMPILE, EVALUATION, HELD):
                shares["checkpoint" if span.name == HELD else span.name] += span.duration_s
        shares[EVALUATION] -= sum(span.duration_s for span in inner)
    shares["step"] = sum(piece.step_s for piece in pieces)
    shares["input_wait"] = sum(piece.wait_s for piece in pieces)
    return shares


def _begins_within(span: Span, others: Sequence[Span]) -> bool:
    return any(other.began <= span.began < other.ended for other in others)


def _share_lines(record: RunRecord) -> dict[str, float]:
    """Return the shares that lines record; evaluations and compiling count as steps."""
    lines = [line for line in record.lines if line["kind"] == TRAIN]
    times = [line["time_s"] for line in lines if isinstance(line.get("time_s"), int | float)]
    waits = {name: sum(line.get(name) or 0.0 for line in lines) for name in _WAITS}
    useful = max(0.0, (times[-1] if times else 0.0) - sum(waits.values()))
    return {"step": useful, "input_wait": waits[WAIT_S], "checkpoint": waits["checkpoint_held_s"]}


def _measure_lines(record: RunRecord, number: int) -> float:
    times = [(line.get("attempt"), line.get("time_s")) for line in record.lines]
    known = [(i, t) for i, t in times if isinstance(i, int) and isinstance(t, int | float)]
    own = [t for i, t in known if i == number]
    before = [t for i, t in known if i < number]
    return max(0.0, own[-1] - (before[-1] if before else 0.0)) if own else 0.0


def view_time(time: RunTime) -> JsonObject:
    """Return the time of a run as a JSON object."""
    return {
        "paid_s": time.paid_s,
        "is_least": time.is_least,
        "goodput": time.goodput,
        "shares_s": time.shares_s,
        "of": "spans" if time.has_spans else "lines",
    }


class NumberRow(NamedTuple):
    """A number with its unit and its better direction; both are empty if unknown."""

    name: str
    value: str
    unit: str
    better: str


class AttemptRow(NamedTuple):
    """A program that has worked on a run, from `began` (seconds since 1970); unknown texts: ""."""

    number: int
    began: float | None
    worked: str
    steps: str
    status: str
    reason: str
    host: str


def list_numbers(values: Mapping[str, float]) -> Iterator[NumberRow]:
    """Yield numbers by name."""
    for name, value in sorted(values.items()):
        entry = find_entry(name)
        better = entry.direction if entry and entry.direction != "none" else ""
        yield NumberRow(name, format_value(value), entry.unit if entry else "", better)


def list_attempt_rows(record: RunRecord) -> Iterator[AttemptRow]:
    """Yield each program that has worked on a run, the first one first."""
    times = {attempt.number: attempt for attempt in list_attempts(record)}
    for line in record.attempts:
        time, worked = times.get(line["attempt"]), ""
        if time is not None:
            worked = format_least(time.ended - time.began, is_least=not time.is_whole)
        steps, status = describe_steps(record, line), name_end(record, line)
        reason, host = (str(line.get(name) or "") for name in ("reason", "host"))
        yield AttemptRow(line["attempt"], line.get("began"), worked, steps, status, reason, host)
