"""Runs against each other: what was set otherwise, what came out otherwise, where they part."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from service.web.series.ranges import Curve, Extent, SeriesReader
from service.web.views.figures import PICTURE_WIDTH, ShownChart, make_overlay
from service.web.views.frame import link_run
from service.web.views.run import read_values
from service.web.views.trials import TrialNames
from store.compare.comparable import choose_comparable, describe_apart, learn_apart
from store.compare.sides import SEED, Side, group_records
from store.formatting import format_sample
from store.query.listing import choose_usual
from store.query.record import RunRecord
from store.record.catalogue import LOSS, TRAIN
from utils.json_types import JsonMapping, JsonObject

# More curves in one chart would hide each other.
_MOST_CURVES = 24
_MOST_CHARTS = 6
MOST_SIDES = 16
_MOST_NAMES = 8


@dataclass(frozen=True)
class ShownSide:
    """A side with its colour and its runs, by path and address."""

    name: str
    ink: int
    runs: tuple[tuple[str, str], ...]
    unfinished: tuple[str, ...]


@dataclass(frozen=True)
class ShownDifference:
    """A key that is not the same on all sides; dim where it cannot change what is learnt."""

    key: str
    values: tuple[str, ...]
    matters: bool


@dataclass(frozen=True)
class VerdictRow:
    """A number on two sides."""

    metric: str
    unit: str
    base: str
    new: str
    difference: str
    interval: str
    p: str
    verdict: str
    css: str


@dataclass(frozen=True)
class VerdictTable:
    """The numbers of one side against the base.

    Attributes:
      missing: runs without a finite number, a line for each number.
      apart: a line on the numbers that cannot be compared; empty if all can.
    """

    name: str
    rows: tuple[VerdictRow, ...]
    method: str
    missing: tuple[str, ...]
    apart: str


@dataclass(frozen=True)
class AnswerRow:
    """Two runs on the very same examples: how often only one of them was right."""

    base: str
    new: str
    examples: str
    base_only: str
    new_only: str
    p: str
    reason: str


@dataclass(frozen=True)
class ShownDivergence:
    """Where two runs part, in sentences; equal: they do not."""

    is_equal: bool
    title: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class CompareView:
    """The page.

    Attributes:
      tables: of the sides that have numbers to compare with the base's.
      apart: one line on the sides that have none; empty if all have some.
    """

    sides: tuple[ShownSide, ...]
    answers: tuple[AnswerRow, ...]
    differences: tuple[ShownDifference, ...]
    environment: tuple[ShownDifference, ...]
    tables: tuple[VerdictTable, ...]
    apart: str
    charts: tuple[ShownChart, ...]
    left_out: int
    divergence: ShownDivergence | None


def name_trials(sides: Sequence[Side], trials: TrialNames) -> list[Side]:
    """Sides that are named after a run of a sweep by the values that it varies."""
    named = []
    for side in sides:
        record, name = side.records[0], ""
        if record.path.endswith(side.name):
            is_one = len(side.records) == 1
            config = {k: v for k, v in record.config.items() if is_one or k != SEED}
            name = trials.describe(record.path, config)
        named.append(replace(side, name=name or side.name))
    return named


def group_seeds(sides: Sequence[Side], ignored: Collection[str]) -> list[Side]:
    """Single runs by their configuration without the seed; as they are where that leaves one."""
    if any(len(side.records) > 1 for side in sides):
        return list(sides)
    grouped = group_records([one for side in sides for one in side.records], ignored)
    if not 1 < len(grouped) < len(sides):
        return list(sides)
    return [replace(side, name=_name(side, grouped)) for side in grouped]


def make_compare_view(
    sides: Sequence[Side], report: JsonObject, series: SeriesReader
) -> CompareView:
    """The page of a comparison.

    Args:
      report: of these sides, as `store.compare.report.create_report` gives it.
    """
    tables = [
        make_table(sides[0], side, rows)
        for side, rows in zip(sides[1:], report["metrics"], strict=True)
    ]
    charts, left_out = make_overlays(sides, series)
    apart = {
        record.path for side in sides[1:] if learn_apart(sides[0], side) for record in side.records
    }
    return CompareView(
        tuple(_show_side(number, side) for number, side in enumerate(sides)),
        tuple(_show_answers(row) for row in report["answers"] if row["new"] not in apart),
        tuple(ShownDifference(**row) for row in report["config"]),
        tuple(ShownDifference(**row) for row in report["environment"]),
        tuple(one for one in tables if one.rows or not one.apart),
        _tell_apart(sides[0], sides[1:], tables),
        charts, left_out, tell_parting(report["divergence"]),
    )  # fmt: skip


def make_overlays(
    sides: Sequence[Side], series: SeriesReader
) -> tuple[tuple[ShownChart, ...], int]:
    """A chart for each number that matters, with all runs; and how many runs have no curve."""
    runs = [(one, side.name, ink) for ink, side in enumerate(sides) for one in side.records]
    shown, known = runs[:_MOST_CURVES], {}
    for record, _, _ in shown:
        names = {f"{TRAIN}.{LOSS}total", *choose_usual(read_values(record))}
        have = set(series.list_metrics(record))
        for name in sorted(names & have, key=lambda name: (name.startswith(TRAIN), name)):
            known.setdefault(name, []).append(record.path)
    charts = []
    for metric in list(known)[:_MOST_CHARTS]:
        mine = [(record, name, ink) for record, name, ink in shown if record.path in known[metric]]
        curves = [_read_curve(series, record, metric) for record, _, _ in mine]
        charts.append(make_overlay(metric, [(r.path, n, i) for r, n, i in mine], curves))
    return tuple(charts), len(runs) - len(shown)


def make_table(base: Side, side: Side, found: Sequence[JsonMapping]) -> VerdictTable:
    """A side's numbers against the base's; what cannot be compared is one line."""
    shared, apart = choose_comparable(base, side, [row["metric"] for row in found])
    rows = [row for row in found if row["metric"] in shared]
    deltas = [row["delta"] for row in rows if row["delta"]]
    pairs = max((delta["pairs"] for delta in deltas), default=0)
    is_single = all(delta["method"] == "single" for delta in deltas)
    method = "" if is_single else (
        f"mean ± standard deviation (n); paired by {pairs} seeds" if pairs
        else "mean ± standard deviation (n); Welch, since seeds differ"
    )  # fmt: skip
    missing = tuple(
        f"{row['metric']}: no finite number in {', '.join(row['bad'][:3])}"
        for row in rows if row["bad"]
    )  # fmt: skip
    return VerdictTable(side.name, tuple(_make_row(row) for row in rows), method, missing, apart)


def _tell_apart(base: Side, sides: Sequence[Side], tables: Sequence[VerdictTable]) -> str:
    """One line on all sides without a comparable number."""
    pairs = list(zip(sides, tables, strict=True))
    other = [side for side, one in pairs if not one.rows and learn_apart(base, side)]
    lone = [one.apart for side, one in pairs if not one.rows and one.apart and side not in other]
    return "; ".join([*([describe_apart(base, other)] if other else []), *lone])


def tell_parting(told: JsonMapping | None) -> ShownDivergence | None:
    """Where two runs part; none: it was not looked for."""
    if told is None:
        return None
    found = told["found"]
    if found is None:
        return ShownDivergence(True, "Equal bit for bit in all deterministic numbers.", ())
    lines = [f"{found['lines']:,} lines before it are equal."]
    if found["metric"]:
        apart = ""
        if found["ulps32"] is not None:
            apart = f", {found['ulps32']:,} numbers of single precision apart"
        elif found["ulps"] is not None:
            apart = f", {found['ulps']:,} numbers of double precision apart"
        lines.append(f"{found['metric']}: {found['base']!r} and {found['new']!r}{apart}.")
    else:
        lines.append("One of them has no such line.")
    if found["others"]:
        lines.append(f"Further numbers of that line: {_shorten(found['others'])}.")
    if told["checkpoint"] is not None:
        lines.append(f"The last checkpoint before it that both have: step {told['checkpoint']:,}.")
    if told["tensors"]:
        lines.append(f"{len(told['tensors'])} tensors differ there: {_shorten(told['tensors'])}.")
    title = f"The runs part at step {found['step']:,} ({found['kind']})."
    return ShownDivergence(False, title, tuple(lines))


def _name(side: Side, sides: Sequence[Side]) -> str:
    """Its experiment where no other side is of it, else its first run."""
    experiments = [{one.path.partition("/")[0] for one in other.records} for other in sides]
    mine = {one.path.partition("/")[0] for one in side.records}
    is_own = len(mine) == 1 and sum(bool(mine & other) for other in experiments) == 1
    return mine.pop() if is_own else side.name


def _show_side(ink: int, side: Side) -> ShownSide:
    runs = tuple((record.path, link_run(record.path)) for record in side.records)
    return ShownSide(side.name, ink % 8, runs, tuple(side.unfinished))


def _read_curve(series: SeriesReader, record: RunRecord, metric: str) -> Curve:
    return series.read(record, [metric], Extent(width=PICTURE_WIDTH)).curves[0]


def _make_row(row: JsonMapping) -> VerdictRow:
    delta = row["delta"]
    interval = "–"
    if delta and delta["low"] is not None:
        interval = f"{delta['low']:+.4g} to {delta['high']:+.4g}"
    css = {"better": "better", "worse": "worse", "missing": "missing"}.get(row["verdict"], "dim")
    return VerdictRow(
        row["metric"], row["unit"], _summarise(row["base"]), _summarise(row["new"]),
        f"{delta['value']:+.4g}" if delta else "–", interval,
        "–" if row["p"] is None else f"{row['p']:.3f}", row["verdict"], css,
    )  # fmt: skip


def _show_answers(row: JsonMapping) -> AnswerRow:
    p = "–" if row["p"] is None else f"{row['p']:.3g}"
    counts = (f"{row[name]:,}" for name in ("examples", "base_only", "new_only"))
    return AnswerRow(row["base"], row["new"], *counts, p, row["reason"])


def _summarise(summary: JsonMapping | None) -> str:
    if summary is None:
        return "–"
    return format_sample(summary["mean"], summary["sd"], summary["n"], summary["runs"])


def _shorten(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMES]) + (", …" if len(names) > _MOST_NAMES else "")
