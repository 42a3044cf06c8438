"""Gates: how much worse a number may become, `metric[@aggregate]:max_pct:max_abs:severity[?]`.

`eval.top1@best:-:0.3:blocker` lets the best top-1 fall by 0.3 points. A limit is a percentage of
the base or a distance in the number's own unit; `-` is no limit. Exceeding either one violates the
gate. A number that is missing or not finite violates it too, unless the gate ends with `?`.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from store.compare.sides import Side, average_by_seed
from store.compare.statistics import Delta, Sample, compute_delta, summarise
from store.formatting import count_runs
from store.query.filters import check_keys
from store.query.listing import view_writer
from store.query.record import RunRecord, get_finite_numbers
from store.record.catalogue import Metric, find_entry
from utils.errors import EXIT_FAILED, UserError, get_hint
from utils.json_types import JsonMapping, JsonValue

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
    """The limits of one number."""

    metric: str  # as filters name it
    # of a run's history: last, best, mean, median, min, max or a percentile as p95
    aggregate: str = "last"
    # max_pct, max_abs: by how much it may be worse; None: no such limit. One of them is set.
    max_pct: float | None = None
    max_abs: float | None = None
    severity: Severity = "major"  # blocker and major fail, minor is only reported
    is_optional: bool = False  # a number that is missing or not finite does not violate the gate
    direction: Direction | None = None  # which way is better; None: as the catalogue says

    def __str__(self) -> str:
        limits = ("-" if x is None else f"{x:g}" for x in (self.max_pct, self.max_abs))
        text = f"{self.metric}@{self.aggregate}:{':'.join(limits)}:{self.severity}"
        return text + "?" * self.is_optional


@dataclass(frozen=True)
class GateFinding:
    """Result of a gate on two sides."""

    gate: Gate
    outcome: Outcome  # undecided: the interval of the difference contains the limit
    reason: str  # in words, with the numbers
    # worse, low, high: by how much the new side is worse, and the interval of that
    worse: float | None = None
    low: float | None = None
    high: float | None = None
    # the lower one of both limits, in the number's unit; None if no limit applies
    limit: float | None = None
    # base, new: means
    base: float | None = None
    new: float | None = None
    # base_n, new_n: number of independent values: seeds, blocks or reports
    base_n: int = 0
    new_n: int = 0

    @property
    def is_grave(self) -> bool:
        """Whether it affects the exit code: minor findings are only reported."""
        return self.gate.severity != "minor"


def parse_gate(text: str) -> Gate:
    """Parse the gate of a flag; UserError if it is malformed."""
    parts = text.strip().rsplit(":", 3)
    if len(parts) != 4:
        raise UserError(f"gate {text!r} has no four parts; {_FORM}")
    name, max_pct, max_abs, severity = (part.strip() for part in parts)
    metric, at, aggregate = name.partition("@")
    values: dict[str, JsonValue] = {
        "metric": metric,
        "severity": severity.removesuffix("?"),
        "optional": severity[-1:] == "?",
    }
    values |= {"aggregate": aggregate} if at else {}
    limits = {"max_pct": max_pct, "max_abs": max_abs}
    values |= {k: _read_limit(text, k, limit) for k, limit in limits.items() if limit != "-"}
    return make_gate(values, text)


def make_gate(values: JsonMapping, text: str) -> Gate:
    """Create a gate from the mapping of a YAML file; `text` names it in errors."""
    for key in values:
        if key not in _KEYS:
            raise UserError(f"gate {text!r}: unknown key {key!r}; {get_hint(str(key), _KEYS)}")
    metric, aggregate = values.get("metric"), values.get("aggregate", "last")
    if not isinstance(metric, str) or not metric:
        raise UserError(f"gate {text!r} names no metric; {_FORM}")
    if not isinstance(aggregate, str) or not (
        aggregate in AGGREGATES or _PERCENTILE.fullmatch(aggregate)
    ):
        raise UserError(
            f"gate {text!r}: unknown aggregate {aggregate!r}; use {', '.join(AGGREGATES)} or a "
            "percentile such as p95"
        )
    severity, direction = values.get("severity", "major"), values.get("direction")
    if severity not in SEVERITIES:
        raise UserError(
            f"gate {text!r}: unknown severity {severity!r}; use {', '.join(SEVERITIES)}"
        )
    if direction is not None and direction not in get_args(Direction):
        raise UserError(f"gate {text!r}: direction must be higher or lower, got {direction!r}")
    limits = {
        key: _read_limit(text, key, values[key])
        for key in ("max_pct", "max_abs")
        if values.get(key) is not None
    }
    if not limits:
        raise UserError(f"gate {text!r} has no limit, so nothing could violate it; {_FORM}")
    is_optional = values.get("optional", False)
    if not isinstance(is_optional, bool):
        raise UserError(f"gate {text!r}: optional must be true or false, got {is_optional!r}")
    return Gate(
        metric, aggregate, **limits, severity=severity, is_optional=is_optional, direction=direction
    )


def resolve_direction(gate: Gate, find: Callable[[str], Metric | None] = find_entry) -> Gate:
    """Return the gate with its direction, its own or that of its entry; UserError without one."""
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


def evaluate_sides(
    gates: Sequence[Gate], base: Side, new: Side, *, unfinished: bool = False
) -> list[GateFinding]:
    """Check the runs of two sides against gates; UserError for runs that are not complete."""
    if not unfinished:
        check_finished((base, new))
    check_known(gates, (base, new))
    return [check_sides(resolve_direction(gate), base, new) for gate in gates]


def check_sides(gate: Gate, base: Side, new: Side) -> GateFinding:
    """Check the runs of two sides against a gate whose direction is resolved."""
    samples: list[Sample] = []
    bad: list[str] = []
    counts: set[int] = set()
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
    """Check two samples against a gate with a direction; `bad` describes missing values."""
    if bad or not base or not new:
        reason = "; ".join(bad[:3]) or "no numbers at all"
        return GateFinding(gate, "skipped" if gate.is_optional else "fail", reason)
    delta = compute_delta(base, new)
    base_mean, new_mean = (summarise(list(sample.values())).mean for sample in (base, new))
    limits = [] if gate.max_abs is None else [gate.max_abs]
    if gate.max_pct is not None and base_mean != 0:
        limits.append(abs(base_mean) * gate.max_pct / 100)
    limit = min(limits, default=None)
    sign = 1.0 if gate.direction == "lower" else -1.0
    worse = sign * delta.value
    ends = sorted(sign * end for end in (delta.low, delta.high) if end is not None)
    low, high = ends or (None, None)
    finding = GateFinding(
        gate, "fail", "", worse, low, high, limit, base_mean, new_mean, len(base), len(new)
    )
    if limit is None:
        return replace(finding, reason="max_pct needs a base other than zero; set max_abs")
    if len(base) + len(new) == 2:
        outcome: Outcome = "fail" if worse > limit else "pass"
    else:
        outcome = _decide(low, high, limit)
    return replace(finding, outcome=outcome, reason=_explain(finding, worse, delta))


def check_known(gates: Sequence[Gate], sides: Sequence[Side]) -> None:
    """Refuse numbers that neither the catalogue nor a run contains; UserError suggests others."""
    known = {name for side in sides for record in side.records for name in record.values}
    check_keys([g.metric for g in gates if find_entry(g.metric) is None], known, "--gate")


def check_finished(sides: Sequence[Side]) -> None:
    """Refuse runs that are not complete: their numbers may still change."""
    unfinished = [record for side in sides for record in side.records if not record.is_complete]
    if unfinished:
        first = unfinished[0]
        more = f" (and {len(unfinished) - 1} more)" if len(unfinished) > 1 else ""
        raise UserError(
            f"gate: {first.path}{more} is not complete: its status is "
            f"{first.facts.status}, {view_writer(first)}; wait until it is complete, or "
            "accept its current numbers by --unfinished"
        )


def get_code(findings: Sequence[GateFinding], undecided: str = "") -> int:
    """Return the exit code: 0, 1 for a regression, 3 (or that of `undecided`) if undecided."""
    grave = {finding.outcome for finding in findings if finding.is_grave}
    if "fail" in grave or ("undecided" in grave and undecided == "fail"):
        return EXIT_FAILED
    return EXIT_UNDECIDED if "undecided" in grave and undecided != "pass" else 0


def compute_aggregate(record: RunRecord, gate: Gate) -> tuple[float | None, int]:
    """Compute a run's number and how many lines it is of; a non-finite value is returned as is."""
    if gate.aggregate == "last":
        return record.values.get(gate.metric), 1
    kind, _, name = gate.metric.partition(".")
    numbers = (get_finite_numbers(line).get(name) for line in record.lines if line["kind"] == kind)
    values = [value for value in numbers if value is not None]
    return aggregate(gate, values), len(values)


def aggregate(gate: Gate, values: Sequence[float]) -> float | None:
    """Aggregate values as the gate says; a non-finite value is returned as is."""
    spoilt = next((value for value in values if not math.isfinite(value)), None)
    if spoilt is not None or not values:
        return spoilt
    functions = {
        "mean": statistics.fmean,
        "median": statistics.median,
        "min": min,
        "max": max,
        "best": max if gate.direction == "higher" else min,
    }
    if gate.aggregate in functions:
        return functions[gate.aggregate](values)
    # The smallest value that at least this share of all values does not exceed.
    rank = math.ceil(float(gate.aggregate[1:]) / 100 * len(values))
    return sorted(values)[max(0, rank - 1)]


def _decide(low: float | None, high: float | None, limit: float) -> Outcome:
    if low is None or high is None:
        return "undecided"  # one value against several: their noise is unknown
    if low > limit:
        return "fail"
    return "pass" if high <= limit else "undecided"


def _explain(finding: GateFinding, worse: float, delta: Delta) -> str:
    word = "worse" if worse > 0 else "better"
    text = f"{abs(worse):.4g} {word}" if worse else "equal"
    if finding.low is not None:
        text += f", 95 % interval {finding.low:+.4g} to {finding.high:+.4g} worse ({delta.method})"
    return f"{text}; at most {finding.limit:.4g} is allowed"


def _read_limit(text: str, key: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise UserError(f"gate {text!r}: {key} must be a number from 0 up, got {value!r}; {_FORM}")
    return number
