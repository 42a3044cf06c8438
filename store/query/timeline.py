"""Where the time of a run went, over all its attempts: shares, goodput, and the pieces of a trace.

Goodput is the one of this house: time of steps that still count, over the time that was paid for.
Waiting for input, compiling, evaluating, checkpoints, going back and whatever was done again are
paid for and not useful; between two attempts nothing is paid.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from store.query.record import RunRecord, describe
from store.record.catalogue import TRAIN, WAIT_S
from store.record.spans import COMPILE, EVALUATION, HELD, ROLLBACK, WINDOW, Span
from utils.json_types import JsonMapping, JsonObject, JsonValue

# What the time of a run is told as, in this order; they sum up to all of it.
SHARES = ("step", "input_wait", "compile", "evaluation", "checkpoint", "redone", "other", "down")
# Time of a line in which the loop did nothing for the run.
_WAITS = (WAIT_S, "checkpoint_held_s")


@dataclass(frozen=True)
class AttemptTime:
    """When a program worked on a run, in seconds since 1970.

    Attributes:
      is_whole: its end is known; a killed one counts as far as its lines and spans go.
    """

    number: int
    from_step: int
    began: float
    ended: float
    is_whole: bool


@dataclass(frozen=True)
class RunTime:
    """Where the time of a run went.

    Attributes:
      paid_s: sum over attempts; none: nobody knows of one when it began.
      is_least: an attempt was killed or tells no beginning, so that it may be more.
      goodput: none: nothing was paid for, or a killed attempt of an earlier program tells too
        little.
      shares_s: seconds by the names of `SHARES`.
      has_spans: without them evaluations and compiling count as steps, and what was done again
        as `other`.
    """

    paid_s: float | None
    is_least: bool
    goodput: float | None
    shares_s: dict[str, float]
    has_spans: bool


def compute_time(record: RunRecord) -> RunTime:
    """Where the time of a run went so far."""
    attempts = list_attempts(record)
    told, is_least = sum_paid(record, attempts)
    paid = told or 0.0
    has_spans = any(span.name == WINDOW for span in record.spans)
    shares = _share_spans(record.spans, attempts) if has_spans else _share_lines(record)
    shares["other"] = max(0.0, paid - sum(shares.values()))
    shares["down"] = sum(ended - began for began, ended in list_downs(attempts))
    # A killed attempt of which nothing but lines is known may have been paid for much longer.
    is_known = paid > 0 and (has_spans or not is_least)
    goodput = min(1.0, shares["step"] / paid) if is_known else None
    return RunTime(told, is_least, goodput, {n: shares.get(n, 0.0) for n in SHARES}, has_spans)


def sum_paid(record: RunRecord, attempts: Sequence[AttemptTime]) -> tuple[float | None, bool]:
    """Seconds that were paid for, and whether it may be more; none: nobody knows.

    This is the one answer to how long a run has worked, wherever it is told.
    """
    if not attempts:
        return None, True
    begun = record.facts.get("attempts")
    count = max(len(record.attempts), begun if isinstance(begun, int) else 0)
    is_least = len(attempts) < count or not all(one.is_whole for one in attempts)
    return math.fsum(one.ended - one.began for one in attempts), is_least


def name_end(record: RunRecord, attempt: JsonObject) -> str:
    """How an attempt ended, in a word; one without an end was killed where another came after."""
    if isinstance(attempt.get("status"), str):
        return attempt["status"]
    is_last = attempt is record.attempts[-1]
    return "killed or at work" if is_last and not record.is_complete else "killed"


def describe_steps(record: RunRecord, attempt: JsonObject) -> str:
    """Return the steps of an attempt; of a killed one those that its lines and spans tell of."""
    first, last = attempt.get("from_step", "?"), attempt.get("to_step")
    if last is None:
        number = attempt["attempt"]
        steps = [line["step"] for line in record.lines if get_attempt(record, line) == number]
        steps += [span.step for span in record.spans if span.attempt == number]
        last = f"≥ {max(steps)}" if steps else "?"
    return f"{first} to {last}"


def list_attempts(record: RunRecord) -> list[AttemptTime]:
    """When each program worked on the run; one that was killed until its last sign of life.

    A run of before `attempts.jsonl` tells its own beginning and end: where one program alone has
    worked on it, that is its attempt; between several nobody knows how long none worked.
    """
    if not record.attempts:
        return _guess_attempt(record)
    found = []
    for one in record.attempts:
        began, ended, number = one.get("began"), one.get("ended"), one.get("attempt")
        if not isinstance(began, int | float) or not isinstance(number, int):
            continue
        is_whole = isinstance(ended, int | float)
        if not is_whole:
            mine = [span.ended for span in record.spans if span.attempt == number]
            ended = max(mine) if mine else began + _measure_lines(record, number)
        from_step = one.get("from_step")
        from_step = from_step if isinstance(from_step, int) else 0
        found.append(AttemptTime(number, from_step, began, max(began, ended), is_whole))
    return found


def _guess_attempt(record: RunRecord) -> list[AttemptTime]:
    facts = describe(record.facts, record.path)
    began, ended, count = (facts[name] for name in ("started", "ended", "attempts"))
    if began is None or ended is None or (count or 1) != 1:
        return []
    return [AttemptTime(1, 0, began, max(began, ended), is_whole=True)]


def get_attempt(record: RunRecord, line: JsonMapping) -> JsonValue:
    """Which program wrote a line; where no attempts are told, the one that `list_attempts` has."""
    return line.get("attempt") if record.attempts else 1


def list_downs(attempts: Sequence[AttemptTime]) -> list[tuple[float, float]]:
    """When nobody worked on the run, between its attempts."""
    pairs = ((one.ended, other.began) for one, other in itertools.pairwise(attempts))
    return [(ended, began) for ended, began in pairs if began > ended]


def make_windows(record: RunRecord, attempts: Sequence[AttemptTime]) -> list[Span]:
    """The windows of a run: its own, or as its lines tell them, from each attempt's beginning on.

    A line of an earlier program knows no time of day: what came before the first step is left out.
    """
    found = [span for span in record.spans if span.name == WINDOW]
    if found:
        return found
    began = {one.number: one.began for one in attempts}
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
        found.append(Span(
            WINDOW, line["step"], start, duration, 0, number, max(0, line["step"] - last_step),
            max(0.0, duration - waits), wait_s,
        ))  # fmt: skip
        last_s, last_step = time_s, line["step"]
    return found


@dataclass
class _Piece:
    """Steps after `low` up to `high`, of which some may be done again."""

    low: int
    high: int
    step_s: float
    wait_s: float

    def cut(self, step: int) -> float:
        """Lose what came after a step; gives the seconds that are lost."""
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
        mine = [span for span in spans if span.attempt == attempt.number and span.rank == 0]
        shares["redone"] += sum(piece.cut(attempt.from_step) for piece in pieces)
        of_evaluations = _sum_within(mine)
        for span in _without_compiling(mine):
            if span.name == WINDOW:
                low = span.step - max(1, span.count)
                pieces.append(_Piece(low, span.step, span.step_s, span.input_wait_s))
            elif span.name == ROLLBACK:
                shares["redone"] += span.duration_s
                shares["redone"] += sum(piece.cut(span.step) for piece in pieces)
            elif span.name in (COMPILE, EVALUATION, HELD):
                name = "checkpoint" if span.name == HELD else span.name
                shares[name] += span.duration_s
        shares[EVALUATION] -= of_evaluations
    shares["step"] = sum(piece.step_s for piece in pieces)
    shares["input_wait"] = sum(piece.wait_s for piece in pieces)
    return shares


def _sum_within(spans: Iterable[Span]) -> float:
    """Seconds of compiling within evaluations."""
    spans = list(spans)
    outer = [span for span in spans if span.name == EVALUATION]
    return sum(
        span.duration_s for span in spans
        if span.name == COMPILE and any(one.began <= span.began < one.ended for one in outer)
    )  # fmt: skip


def _without_compiling(spans: Sequence[Span]) -> list[Span]:
    """The spans, their windows without the compiling that began within one of their steps."""
    outer = [span for span in spans if span.name == EVALUATION]
    gained = [
        span for span in spans
        if span.name == COMPILE and not any(one.began <= span.began < one.ended for one in outer)
    ]  # fmt: skip
    found = []
    for span in spans:
        if span.name == WINDOW:
            inner = [one for one in gained if span.began <= one.began < span.ended]
            seconds = sum(one.duration_s for one in inner)
            span = replace(span, step_s=max(0.0, span.step_s - seconds))
        found.append(span)
    return found


def _share_lines(record: RunRecord) -> dict[str, float]:
    """What lines alone tell: those that stand, with their evaluations and compiling."""
    lines = [line for line in record.lines if line["kind"] == TRAIN]
    times = [line["time_s"] for line in lines if isinstance(line.get("time_s"), int | float)]
    waits = {name: sum(line.get(name) or 0.0 for line in lines) for name in _WAITS}
    useful = max(0.0, (times[-1] if times else 0.0) - sum(waits.values()))
    return {"step": useful, "input_wait": waits[WAIT_S], "checkpoint": waits["checkpoint_held_s"]}


def _measure_lines(record: RunRecord, number: int) -> float:
    """Seconds of an attempt that its lines tell of."""
    times = [(line.get("attempt"), line.get("time_s")) for line in record.lines]
    known = [(one, t) for one, t in times if isinstance(one, int) and isinstance(t, int | float)]
    mine = [t for one, t in known if one == number]
    before = [t for one, t in known if one < number]
    return max(0.0, mine[-1] - (before[-1] if before else 0.0)) if mine else 0.0


def tell_time(found: RunTime) -> JsonObject:
    """The same as a JSON object."""
    return {"paid_s": found.paid_s, "is_least": found.is_least, "goodput": found.goodput,
            "shares_s": found.shares_s, "of": "spans" if found.has_spans else "lines"}  # fmt: skip
