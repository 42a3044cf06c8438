"""Runs against each other: what was set otherwise, what came out otherwise, where they part."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from service.web.series.ranges import Curve, Extent, SeriesReader
from service.web.views.figures import PICTURE_WIDTH, ShownChart, make_overlay
from service.web.views.run import read_values
from service.web.views.trials import TrialNames
from store.compare.answers import SameExamples
from store.compare.report import CompareReport
from store.compare.rows import ComparedSide, describe_divergence, describe_side
from store.compare.sides import SEED, Side, describe_apart, group_records, learn_apart
from store.query.listing import choose_usual
from store.query.record import RunRecord
from store.record.catalogue import LOSS, TRAIN

# More curves in one chart would hide each other.
_MOST_CURVES = 24
_MOST_CHARTS = 6
MOST_SIDES = 16


@dataclass(frozen=True)
class CompareView:
    """The page.

    Attributes:
      answers: of sides that have a task in common with the base.
      tables: of the sides that have numbers to compare with the base's.
      apart: one line on the sides that have none; empty if all have some.
      divergence: where two runs part, in sentences; empty: it was not looked for.
    """

    report: CompareReport
    answers: tuple[SameExamples, ...]
    tables: tuple[ComparedSide, ...]
    apart: str
    charts: tuple[ShownChart, ...]
    left_out: int
    divergence: tuple[str, ...]


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


def make_compare_view(report: CompareReport, series: SeriesReader) -> CompareView:
    """The page of a comparison."""
    base, rest = report.sides[0], report.sides[1:]
    tables = [describe_side(base, *one) for one in zip(rest, report.metrics, strict=True)]
    charts, left_out = make_overlays(report.sides, series)
    apart = {record.path for side in rest if learn_apart(base, side) for record in side.records}
    told = report.divergence
    return CompareView(
        report,
        tuple(one for one in report.answers if one.new not in apart),
        tuple(one for one in tables if one.is_shown),
        _tell_apart(base, rest, tables),
        charts,
        left_out,
        () if told is None else tuple(describe_divergence(told)),
    )


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


def _tell_apart(base: Side, sides: Sequence[Side], tables: Sequence[ComparedSide]) -> str:
    """One line on all sides without a comparable number."""
    pairs = list(zip(sides, tables, strict=True))
    other = [side for side, one in pairs if not one.rows and learn_apart(base, side)]
    lone = [one.apart for side, one in pairs if not one.rows and one.apart and side not in other]
    return "; ".join([*([describe_apart(base, other)] if other else []), *lone])


def _name(side: Side, sides: Sequence[Side]) -> str:
    """Its experiment where no other side is of it, else its first run."""
    experiments = [{one.path.partition("/")[0] for one in other.records} for other in sides]
    mine = {one.path.partition("/")[0] for one in side.records}
    is_own = len(mine) == 1 and sum(bool(mine & other) for other in experiments) == 1
    return mine.pop() if is_own else side.name


def _read_curve(series: SeriesReader, record: RunRecord, metric: str) -> Curve:
    return series.read(record, [metric], Extent(width=PICTURE_WIDTH)).curves[0]
