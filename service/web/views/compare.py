"""The page of a comparison: settings and results that differ, and where two runs diverge."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from service.web.series.ranges import Extent, SeriesReader
from service.web.views.figures import PICTURE_WIDTH, ShownChart, make_overlay
from service.web.views.run import read_values
from service.web.views.trials import TrialNames
from store.compare.modules import MODULE_COLUMNS, describe_modules
from store.compare.report import CompareReport
from store.compare.rows import ComparedSide, describe_divergence, describe_side
from store.compare.sides import SEED, Side, describe_apart, group_records, learn_apart
from store.query.listing import choose_usual
from store.record.catalogue import LOSS, TRAIN
from utils.json_types import JsonObject

# More curves in one chart would hide each other.
_MOST_CURVES = 24
_MOST_CHARTS = 6
MOST_SIDES = 16


def name_trials(sides: Sequence[Side], trials: TrialNames) -> list[Side]:
    """Name sides that are trials of a sweep by the values that the sweep varies."""
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
    """Group single runs by their configuration without the seed, unless one group remains."""
    if any(len(side.records) > 1 for side in sides):
        return list(sides)
    grouped = group_records([record for side in sides for record in side.records], ignored)
    if not 1 < len(grouped) < len(sides):
        return list(sides)
    experiments = [{record.path.partition("/")[0] for record in side.records} for side in grouped]
    named = []
    for side, mine in zip(grouped, experiments, strict=True):
        # A side is named after its experiment if no other side has it, else after its first run.
        is_own = len(mine) == 1 and sum(bool(mine & other) for other in experiments) == 1
        named.append(replace(side, name=next(iter(mine)) if is_own else side.name))
    return named


def make_compare_view(report: CompareReport, series: SeriesReader) -> JsonObject:
    """Create the content of the page; all sides of other tasks are described in one line."""
    base, rest = report.sides[0], report.sides[1:]
    tables = [describe_side(base, *pair) for pair in zip(rest, report.metrics, strict=True)]
    charts, left_out = make_overlays(report.sides, series)
    apart = {record.path for side in rest if learn_apart(base, side) for record in side.records}
    return {
        "report": report,
        "answers": [answer for answer in report.answers if answer.new not in apart],
        "tables": [table for table in tables if table.is_shown],
        "modules": [
            (side.name, describe_modules(changes))
            for side, changes in zip(rest, report.modules, strict=True)
            if changes
        ],
        "module_columns": [title.removesuffix(">") for title in MODULE_COLUMNS],
        "apart": _describe_apart(base, rest, tables),
        "charts": charts,
        "left_out": left_out,
        "divergence": report.divergence and describe_divergence(report.divergence),
    }


def make_overlays(sides: Sequence[Side], series: SeriesReader) -> tuple[list[ShownChart], int]:
    """Create a chart with all runs for each important number; count the runs left out."""
    runs = [(run, side.name, ink) for ink, side in enumerate(sides) for run in side.records]
    shown = runs[:_MOST_CURVES]
    known: dict[str, list[str]] = {}
    for record, _, _ in shown:
        names = {f"{TRAIN}.{LOSS}total", *choose_usual(read_values(record))}
        have = set(series.list_metrics(record))
        for name in sorted(names & have, key=lambda name: (name.startswith(TRAIN), name)):
            known.setdefault(name, []).append(record.path)
    charts = []
    for metric in list(known)[:_MOST_CHARTS]:
        mine = [(record, name, ink) for record, name, ink in shown if record.path in known[metric]]
        curves = [
            series.read(record, [metric], Extent(width=PICTURE_WIDTH)).curves[0]
            for record, _, _ in mine
        ]
        charts.append(make_overlay(metric, [(r.path, n, i) for r, n, i in mine], curves))
    return charts, len(runs) - len(shown)


def _describe_apart(base: Side, sides: Sequence[Side], tables: Sequence[ComparedSide]) -> str:
    """Describe all sides without a comparable number in one line."""
    pairs = [(side, table) for side, table in zip(sides, tables, strict=True) if not table.rows]
    other = [side for side, _ in pairs if learn_apart(base, side)]
    lone = [table.apart for side, table in pairs if table.apart and side not in other]
    return "; ".join([*([describe_apart(base, other)] if other else []), *lone])
