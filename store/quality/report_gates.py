"""Checks a report against an earlier one with the gates of runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from store.compare.statistics import Sample
from store.quality.gates import Gate, GateFinding, aggregate, check_samples, resolve_direction
from store.quality.reports import (
    BENCHMARK,
    COMPILER_NOISE,
    VERDICT,
    find_figure,
    get_conditions,
    get_kind,
    get_settings,
    read_blocks,
    read_figures,
)
from utils.errors import UserError, get_hint
from utils.json_types import JsonMapping, JsonObject

# Default limit as a percentage; graphs may not grow at all.
DEFAULT_PCT = 100 * COMPILER_NOISE
_SHARES = ("peak_host_gib", "peak_device_gib", "engine_over_bare")


def make_default_gates(reports: Sequence[JsonObject], max_pct: float) -> list[Gate]:
    """Return gates on the standard figures of reports, each of which may be `max_pct` % worse."""
    known = {
        name.rpartition(" x ")[2]
        for report in reports
        for name, value in read_figures(report).items()
        if value is not None
    }
    if get_kind(reports[0]) == VERDICT:
        return [
            Gate("estimated_mcycles", max_pct=max_pct),
            Gate("peak_bytes", max_pct=max_pct, severity="minor"),
        ]
    names = [name for name in sorted(known) if name.endswith("_per_s") or name in _SHARES]
    return [*(Gate(name, max_pct=max_pct) for name in names), Gate("graphs", max_abs=0.0)]


def check_reports(gates: Sequence[Gate], base: JsonObject, new: JsonObject) -> list[GateFinding]:
    """Check two reports of the same thing against gates.

    A figure with repeated blocks is compared by all of them, so it may be undecided, unless the
    gate has an aggregate. A figure that one report lacks is a finding.

    Raises:
      UserError: the reports are not comparable, or no report has a gate's figure.
    """
    check_comparable(base, new)
    figures = [read_figures(report) for report in (base, new)]
    names = list(dict.fromkeys([*figures[1], *figures[0]]))
    findings: list[GateFinding] = []
    for gate in resolve_gates(gates, names):
        wanted = [name for name in names if gate.metric in (name, name.rpartition(" x ")[2])]
        gates_of_names = [replace(gate, metric=name) for name in wanted or [gate.metric]]
        findings += [_check(named, (base, new), figures) for named in gates_of_names]
    return findings


def resolve_gates(gates: Sequence[Gate], names: Iterable[str]) -> list[Gate]:
    """Return the gates with their directions; UserError for one on none of the figures `names`."""
    known = {short for name in names for short in (name, name.rpartition(" x ")[2])}
    for gate in gates:
        if find_figure(gate.metric) is None and gate.metric not in known:
            hint = get_hint(gate.metric, known)
            raise UserError(f"--gate: no report has a figure {gate.metric!r}; {hint}")
    return [resolve_direction(gate, find_figure) for gate in gates]


def check_settings(
    base: JsonObject, config: JsonObject, source: str, counts: Collection[int] = ()
) -> None:
    """Refuse an earlier benchmark of other settings or process counts, before measuring."""
    if get_kind(base) != BENCHMARK:
        raise UserError(
            f"--compare: that report is a {get_kind(base)}, this one will be a {BENCHMARK}; give a "
            "--json file of this program"
        )
    measured = {result["processes"] for result in base["results"]}
    if counts and not measured & set(counts):
        _refuse_counts(measured, counts)
    before = get_settings(base["config"], base["settings"]["input"])
    _refuse_different(before, get_settings(config, source))


def check_comparable(base: JsonObject, new: JsonObject) -> None:
    """Refuse reports of different things: UserError names the first condition that differs."""
    if get_kind(base) != get_kind(new):
        raise UserError(
            f"--compare: that report is a {get_kind(base)}, this one is a {get_kind(new)}; give a "
            "--json file of this program"
        )
    before, now = get_conditions(base), get_conditions(new)
    if get_kind(new) == BENCHMARK:
        counts = [{row["processes"] for row in report["results"]} for report in (base, new)]
        if not counts[0] & counts[1]:
            _refuse_counts(*counts)
        # Figures that only one report has are findings, not refusals.
        alone = tuple(f"{count} x " for count in counts[0] ^ counts[1])
        before, now = (
            {key: value for key, value in conditions.items() if not key.startswith(alone)}
            for conditions in (before, now)
        )
    _refuse_different(before, now)


def _refuse_counts(before: Collection[int], now: Collection[int]) -> None:
    raise UserError(
        f"--compare: that report has {sorted(before)} processes, this one has {sorted(now)}; "
        "measure the same numbers"
    )


def _refuse_different(before: JsonMapping, now: JsonMapping) -> None:
    different = sorted(key for key in before.keys() | now if before.get(key) != now.get(key))
    if different:
        key = different[0]
        raise UserError(
            f"--compare: {key} is {now.get(key)!r} now and was {before.get(key)!r} "
            f"({len(different)} differ); compare reports of the same settings"
        )


def _check(
    gate: Gate, reports: Sequence[JsonObject], figures: Sequence[Mapping[str, float | None]]
) -> GateFinding:
    samples: list[Sample] = []
    bad: list[str] = []
    words = ("the earlier report", "this report")
    for word, report, values in zip(words, reports, figures, strict=True):
        value = values.get(gate.metric)
        if value is None:
            bad.append(f"{word} has no {gate.metric}")
            samples.append({})
            continue
        blocks = read_blocks(report, gate.metric) or [value]
        if gate.aggregate != "last":
            whole = aggregate(gate, blocks)
            blocks = blocks if whole is None else [whole]
        # Blocks of different reports are not paired: their keys differ.
        samples.append({(word, index): block for index, block in enumerate(blocks)})
    finding = check_samples(gate, samples[0], samples[1], bad)
    if finding.base_n + finding.new_n > 2:  # the report itself shows their median
        words = f"{finding.reason}; means of {finding.base_n} and {finding.new_n} blocks"
        return replace(finding, reason=words)
    return finding
