"""Gates: how much worse a number may become, `metric[@aggregate]:max_pct:max_abs:severity[?]`.

`eval.top1@best:-:0.3:blocker` lets the best top-1 fall by 0.3 points. A limit is a percentage of
the base or a distance in the number's own unit; `-` is none. Worse by more than either one violates
the gate. A number that is missing or not finite is a finding too, unless a `?` stands at the end.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from store.compare.sides import Side, average_by_seed
from store.compare.statistics import Delta, Sample, compute_delta, summarise
from store.formatting import count_runs
from store.query.filters import check_keys
from store.query.listing import tell_writer
from store.query.record import RunRecord, get_finite_or_told
from store.record.catalogue import Metric, find_entry
from utils.errors import EXIT_FAILED, UserError, get_hint
from utils.json_types import JsonValue

Severity = Literal["blocker", "major", "minor"]
Outcome = Literal["pass", "fail", "undecided", "skipped"]
Direction = Literal["higher", "lower"]
SEVERITIES = get_args(Severity)
EXIT_UNDECIDED = 3
AGGREGATES = ("last", "best", "mean", "median", "min", "max")
_KEYS = ("metric", "aggregate", "max_pct", "max_abs", "severity", "optional", "direction")
_PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d+)?)")
_FORM = "write metric[@aggregate]:max_pct:max_abs:severity, with - for no limit"


@dataclass(frozen=True)
class Gate:
    """What one number may do.

    Attributes:
      metric: as filters name it.
      aggregate: of a run's history: last, best, mean, median, min, max or a percentile as p95.
      max_pct, max_abs: by how much it may be worse; none: no such limit; one of them is given.
      severity: blocker and major fail, minor is told.
      is_optional: a number that is missing or not finite is no finding.
      direction: which way is better; none: as the catalogue says.
    """

    metric: str
    aggregate: str = "last"
    max_pct: float | None = None
    max_abs: float | None = None
    severity: Severity = "major"
    is_optional: bool = False
    direction: Direction | None = None

    def __str__(self) -> str:
        limits = ("-" if one is None else f"{one:g}" for one in (self.max_pct, self.max_abs))
        text = f"{self.metric}@{self.aggregate}:{':'.join(limits)}:{self.severity}"
        return text + "?" * self.is_optional


@dataclass(frozen=True)
class GateFinding:
    """What a gate says of two sides.

    Attributes:
      outcome: of the gate; undecided: the interval of the difference holds the limit.
      reason: in words, with the numbers.
      worse, low, high: by how much the new side is worse, and the interval of that; none: unknown.
      limit: the lower one of both limits, in the number's unit; none: there is none that holds.
      base, new: means.
      base_n, new_n: independent values that they are of: seeds, or blocks or reports.
    """

    gate: Gate
    outcome: Outcome
    reason: str
    worse: float | None = None
    low: float | None = None
    high: float | None = None
    limit: float | None = None
    base: float | None = None
    new: float | None = None
    base_n: int = 0
    new_n: int = 0

    @property
    def is_grave(self) -> bool:
        """Whether it counts: minor ones are only told."""
        return self.gate.severity != "minor"


def parse_gate(text: str) -> Gate:
    """The gate that a flag says.

    Raises:
      UserError: names what is wrong with it.
    """
    parts = text.strip().rsplit(":", 3)
    if len(parts) != 4:
        raise UserError(f"gate {text!r} has no four parts; {_FORM}")
    name, max_pct, max_abs, severity = (part.strip() for part in parts)
    metric, at, aggregate = name.partition("@")
    values: dict[str, JsonValue] = {
        "metric": metric, "severity": severity.removesuffix("?"), "optional": severity[-1:] == "?",
    }  # fmt: skip
    values |= {"aggregate": aggregate} if at else {}
    for key, limit in (("max_pct", max_pct), ("max_abs", max_abs)):
        if limit != "-":
            values[key] = _read_limit(text, key, limit)
    return make_gate(values, text)


def make_gate(values: Mapping[str, JsonValue], text: str) -> Gate:
    """The gate that an entry of a YAML file says.

    Args:
      text: how it stands there, for errors.

    Raises:
      UserError: names what is wrong with it.
    """
    for key in values:
        if key not in _KEYS:
            raise UserError(f"gate {text!r} has no key {key!r}; {get_hint(str(key), _KEYS)}")
    metric, aggregate = values.get("metric"), values.get("aggregate", "last")
    if not isinstance(metric, str) or not metric:
        raise UserError(f"gate {text!r} names no metric; {_FORM}")
    if not _is_aggregate(aggregate):
        raise UserError(
            f"gate {text!r}: {aggregate!r} is no aggregate; use {', '.join(AGGREGATES)} or a "
            "percentile such as p95"
        )
    severity, direction = values.get("severity", "major"), values.get("direction")
    if severity not in SEVERITIES:
        raise UserError(f"gate {text!r}: {severity!r} is no severity; use {', '.join(SEVERITIES)}")
    if direction is not None and direction not in get_args(Direction):
        raise UserError(f"gate {text!r}: direction {direction!r} is neither higher nor lower")
    limits = {
        key: _read_limit(text, key, values[key])
        for key in ("max_pct", "max_abs")
        if values.get(key) is not None
    }
    if not limits:
        raise UserError(f"gate {text!r} has no limit, so nothing could violate it; {_FORM}")
    is_optional = values.get("optional", False)
    if not isinstance(is_optional, bool):
        raise UserError(f"gate {text!r}: optional ({is_optional!r}) is neither true nor false")
    return Gate(metric, aggregate, **limits, severity=severity, is_optional=is_optional,
                direction=direction)  # fmt: skip


def settle_direction(gate: Gate, find: Callable[[str], Metric | None] = find_entry) -> Gate:
    """The gate with the direction that it or a catalogue gives.

    Args:
      find: gives a number's entry of the catalogue.

    Raises:
      UserError: nobody says which way is better; it is never guessed from a name.
    """
    if gate.direction is not None:
        return gate
    entry = find(gate.metric)
    if entry is not None and entry.direction != "none":
        return replace(gate, direction=entry.direction)
    known = "is in no catalogue of metrics" if entry is None else "has no better direction"
    raise UserError(
        f"gate {str(gate)!r}: {gate.metric} {known}; say which way is better by "
        f"--direction {gate.metric}=higher or =lower"
    )


def judge_sides(
    gates: Sequence[Gate], base: Side, new: Side, *, unfinished: bool = False
) -> list[GateFinding]:
    """Hold the runs of two sides against gates.

    Args:
      unfinished: runs that are not complete are judged, too.

    Raises:
      UserError: one is not, a number that nobody knows, or one without a better direction.
    """
    if not unfinished:
        check_finished((base, new))
    check_known(gates, (base, new))
    return [check_sides(settle_direction(gate), base, new) for gate in gates]


def check_sides(gate: Gate, base: Side, new: Side) -> GateFinding:
    """Hold the runs of two sides against a gate whose direction is settled."""
    samples, bad, counts = [], [], set()
    for side in (base, new):
        good = []
        for record in side.records:
            value, count = compute_aggregate(record, gate)
            counts.add(count)
            if value is None or not math.isfinite(value):
                word = "has no such number" if value is None else f"is {value}"
                bad.append(f"{record.path} {word}")
            else:
                good.append((record, value))
        samples.append(average_by_seed(side.name, good))
    finding = check_samples(gate, samples[0], samples[1], bad)
    for side, sample in zip((base, new), samples, strict=True):
        if 0 < len(sample) < len(side.records):
            words = f"{side.name} has {count_runs(len(side.records), len(sample))}"
            finding = replace(finding, reason=f"{finding.reason}; {words}")
    if gate.aggregate == "best" and len(counts) > 1:
        words = f"{finding.reason}; best of unequal numbers of evaluations: {sorted(counts)}"
        return replace(finding, reason=words)
    return finding


def check_samples(gate: Gate, base: Sample, new: Sample, bad: Sequence[str] = ()) -> GateFinding:
    """Hold two samples against a gate whose direction is settled.

    Args:
      bad: what is missing or not finite, in words.
    """
    if bad or not base or not new:
        reason = "; ".join(bad[:3]) or "no numbers at all"
        return GateFinding(gate, "skipped" if gate.is_optional else "fail", reason)
    delta = compute_delta(base, new)
    means = [summarise(list(one.values())).mean for one in (base, new)]
    limit = _get_limit(gate, means[0])
    sign = 1.0 if gate.direction == "lower" else -1.0
    ends = sorted(sign * one for one in (delta.low, delta.high) if one is not None)
    low, high = ends if ends else (None, None)
    finding = GateFinding(gate, "fail", "", sign * delta.value, low, high, limit, *means,
                          len(base), len(new))  # fmt: skip
    if limit is None:
        return replace(finding, reason="a percentage of a base of zero says nothing; give max_abs")
    outcome = _decide(finding, len(base) + len(new), limit)
    return replace(finding, outcome=outcome, reason=_explain(finding, delta))


def check_known(gates: Sequence[Gate], sides: Sequence[Side]) -> None:
    """A number of the catalogue may be missing, which is a finding; what nobody knows is a typo.

    Raises:
      UserError: names it, with the nearest known ones.
    """
    known = {name for side in sides for one in side.records for name in one.values}
    check_keys([g.metric for g in gates if find_entry(g.metric) is None], known, "--gate")


def check_finished(sides: Sequence[Side]) -> None:
    """Refuse runs whose numbers may still change, or never came to their end.

    Raises:
      UserError: names the first of them.
    """
    unfinished = [record for side in sides for record in side.records if not record.is_complete]
    if unfinished:
        first = unfinished[0]
        more = f" (and {len(unfinished) - 1} more)" if len(unfinished) > 1 else ""
        raise UserError(
            f"gate: {first.path}{more} is not complete: its status is "
            f"{first.facts.get('status')}, {tell_writer(first)}; let it come to its end, or judge "
            "what is there by --unfinished"
        )


def get_code(findings: Sequence[GateFinding], undecided: str = "") -> int:
    """The exit code of some findings: 0, 1 for a regression, 3 for undecided; minor ones are told.

    Args:
      undecided: `fail` or `pass`: what takes the place of 3.
    """
    grave = {one.outcome for one in findings if one.is_grave}
    if "fail" in grave or ("undecided" in grave and undecided == "fail"):
        return EXIT_FAILED
    return EXIT_UNDECIDED if "undecided" in grave and undecided != "pass" else 0


def compute_aggregate(record: RunRecord, gate: Gate) -> tuple[float | None, int]:
    """A run's number and how many lines it comes from; one that is not finite spoils them all."""
    if gate.aggregate == "last":
        return record.values.get(gate.metric), 1
    kind, _, name = gate.metric.partition(".")
    told = (get_finite_or_told(line).get(name) for line in record.lines if line["kind"] == kind)
    values = [value for value in told if value is not None]
    return aggregate(gate, values), len(values)


def aggregate(gate: Gate, values: Sequence[float]) -> float | None:
    """One number for several as the gate wants it; one that is not finite spoils them all."""
    spoilt = next((value for value in values if not math.isfinite(value)), None)
    if spoilt is not None or not values:
        return spoilt
    functions = {"mean": statistics.fmean, "median": statistics.median, "min": min, "max": max,
                 "best": max if gate.direction == "higher" else min}  # fmt: skip
    if gate.aggregate in functions:
        return functions[gate.aggregate](values)
    # The smallest value that so many percent do not exceed.
    rank = math.ceil(float(gate.aggregate[1:]) / 100 * len(values))
    return sorted(values)[max(0, rank - 1)]


def _decide(finding: GateFinding, count: int, limit: float) -> Outcome:
    if count == 2:
        return "fail" if finding.worse > limit else "pass"
    if finding.low is None or finding.high is None:
        return "undecided"  # one value against several: nobody knows how much chance there is
    if finding.low > limit:
        return "fail"
    return "pass" if finding.high <= limit else "undecided"


def _get_limit(gate: Gate, base: float) -> float | None:
    limits = [] if gate.max_abs is None else [gate.max_abs]
    if gate.max_pct is not None and base != 0:
        limits.append(abs(base) * gate.max_pct / 100)
    return min(limits, default=None)


def _explain(finding: GateFinding, delta: Delta) -> str:
    word = "worse" if finding.worse > 0 else "better"
    text = f"{abs(finding.worse):.4g} {word}" if finding.worse else "equal"
    if finding.low is not None:
        text += f", 95 % interval {finding.low:+.4g} to {finding.high:+.4g} worse ({delta.method})"
    return f"{text}; at most {finding.limit:.4g} is allowed"


def _is_aggregate(text: JsonValue) -> bool:
    return isinstance(text, str) and (text in AGGREGATES or bool(_PERCENTILE.fullmatch(text)))


def _read_limit(text: str, key: str, value: JsonValue) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise UserError(f"gate {text!r}: {key} ({value!r}) is no number from 0 up; {_FORM}")
    return number
