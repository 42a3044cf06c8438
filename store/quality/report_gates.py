"""Holds a report against an earlier one: the figures go through the very gates of runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from store.quality.gates import Gate, GateFinding, aggregate, check_samples, settle_direction
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

# What may be worse by a share where nobody says otherwise; graphs may not grow at all.
DEFAULT_PCT = 100 * COMPILER_NOISE
_SHARES = ("peak_host_gib", "peak_device_gib", "engine_over_bare")
Reading = Mapping[str, float | None]


def make_default_gates(reports: Sequence[JsonObject], max_pct: float) -> list[Gate]:
    """What is judged where no gate is given: each of these figures that a report has.

    Args:
      max_pct: by how many percent a figure may be worse.
    """
    known = {
        name.rpartition(" x ")[2]
        for report in reports
        for name, value in read_figures(report).items()
        if value is not None
    }
    if get_kind(reports[0]) == VERDICT:
        return [Gate("estimated_mcycles", max_pct=max_pct),
                Gate("peak_bytes", max_pct=max_pct, severity="minor")]  # fmt: skip
    names = [name for name in sorted(known) if name.endswith("_per_s") or name in _SHARES]
    return [*(Gate(name, max_pct=max_pct) for name in names), Gate("graphs", max_abs=0.0)]


def check_reports(gates: Sequence[Gate], base: JsonObject, new: JsonObject) -> list[GateFinding]:
    """What each gate says of two reports of the same thing.

    A figure that has repeated blocks is judged by all of them, so that it may be undecided, unless
    the gate asks for an aggregate. One that a report lacks is a finding.

    Raises:
      UserError: the two are of different things, or a gate asks for what no report has.
    """
    check_comparable(base, new)
    figures = [read_figures(report) for report in (base, new)]
    names = list(dict.fromkeys([*figures[1], *figures[0]]))
    found = []
    for gate in settle_gates(gates, names):
        wanted = [name for name in names if gate.metric in (name, name.rpartition(" x ")[2])]
        for name in wanted or [gate.metric]:
            found.append(_check(replace(gate, metric=name), (base, new), figures))
    return found


def settle_gates(gates: Sequence[Gate], names: Iterable[str]) -> list[Gate]:
    """The gates with their directions.

    Args:
      names: figures that some report has.

    Raises:
      UserError: a gate on what no report has, or without a direction.
    """
    known = {short for name in names for short in (name, name.rpartition(" x ")[2])}
    for gate in gates:
        if find_figure(gate.metric) is None and gate.metric not in known:
            hint = get_hint(gate.metric, known)
            raise UserError(f"--gate: no report has a figure {gate.metric!r}; {hint}")
    return [settle_direction(gate, find_figure) for gate in gates]


def check_settings(
    base: JsonObject, config: JsonObject, source: str, counts: Collection[int] = ()
) -> None:
    """Refuse an earlier benchmark of other settings, before anything is measured.

    Args:
      config: of the new measurement, by sections.
      source: its `--input`.
      counts: its numbers of processes; none: not known yet.

    Raises:
      UserError: names the first setting in which they differ.
    """
    if get_kind(base) != BENCHMARK:
        raise UserError(
            f"--compare: that is a {get_kind(base)}, this one will be a {BENCHMARK}; give a --json "
            "file of this program"
        )
    measured = {one["processes"] for one in base["results"]}
    if counts and not measured & set(counts):
        _refuse_counts(measured, counts)
    now = get_settings(config, source)
    before = get_settings(base["config"], base["settings"]["input"])
    _refuse_different(before, now)


def check_comparable(base: JsonObject, new: JsonObject) -> None:
    """Refuse two reports of different things.

    Raises:
      UserError: names the first condition in which they differ.
    """
    if get_kind(base) != get_kind(new):
        raise UserError(
            f"--compare: that is a {get_kind(base)}, this one is a {get_kind(new)}; give a --json "
            "file of this program"
        )
    before, now = get_conditions(base), get_conditions(new)
    if get_kind(new) == BENCHMARK:
        counts = [{one["processes"] for one in report["results"]} for report in (base, new)]
        if not counts[0] & counts[1]:
            _refuse_counts(*counts)
        # What one of them alone has measured is a finding of its figures.
        alone = tuple(f"{count} x " for count in counts[0] ^ counts[1])
        before, now = (
            {key: value for key, value in one.items() if not key.startswith(alone)}
            for one in (before, now)
        )
    _refuse_different(before, now)


def _refuse_counts(before: Collection[int], now: Collection[int]) -> None:
    raise UserError(
        f"--compare: that report has {sorted(before)} processes, this one has {sorted(now)}; "
        "measure the same"
    )


def _refuse_different(before: JsonMapping, now: JsonMapping) -> None:
    different = sorted(key for key in before.keys() | now if before.get(key) != now.get(key))
    if different:
        key = different[0]
        raise UserError(
            f"--compare: {key} is {now.get(key)!r} now and was {before.get(key)!r} "
            f"({len(different)} differ); reports compare only where all that is equal"
        )


def _check(gate: Gate, reports: Sequence[JsonObject], figures: Sequence[Reading]) -> GateFinding:
    samples, bad = [], []
    words = ("the earlier report", "this report")
    for word, report, told in zip(words, reports, figures, strict=True):
        value = told.get(gate.metric)
        if value is None:
            bad.append(f"{word} has no {gate.metric}")
            samples.append({})
            continue
        blocks = read_blocks(report, gate.metric)
        if gate.aggregate != "last":
            blocks = [aggregate(gate, blocks or [value])]
        # Blocks of two reports have nothing in common that could pair them.
        samples.append({(word, place): one for place, one in enumerate(blocks or [value])})
    found = check_samples(gate, samples[0], samples[1], bad)
    if found.base_n + found.new_n > 2:
        # The report itself tells their median.
        words = f"{found.reason}; means of {found.base_n} and {found.new_n} blocks"
        return replace(found, reason=words)
    return found
