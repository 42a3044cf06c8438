"""`cost`: cost of runs and sweeps, the cheapest for their metric, and the cost of a point."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, replace

from rich.text import Text

from store.formatting import format_least, format_value, name_few
from store.quality.costs import (
    CostRow,
    RunCost,
    compute_cost,
    find_front,
    hold_against,
    read_prices,
    sum_costs,
)
from store.query.filters import check_keys
from store.query.record import RunRecord, describe
from store.query.selection import RunSelector
from store.record.catalogue import find_entry
from store.terminal import create_console, create_table, print_json
from tools.runs.find_runs import check_choice, find_paths, open_index, warn_of_damage
from utils.errors import UserError, get_hint
from utils.json_types import JsonObject
from utils.log import get_logger


def show_costs(options: argparse.Namespace) -> None:
    """Print the cost of each run or group of runs, and the total."""
    check_choice(options, "cost", options.runs)
    prices = read_prices(options.prices) if options.prices else []
    records = _read_records(options)
    warn_of_damage(records)
    if options.metric:
        check_keys([options.metric], {n for r in records for n in r.values}, "--metric")
    costs = [compute_cost(record, prices) for record in records]
    rows = group_costs(options, records, costs)
    if options.base:
        rows = _compare_with_base(options, rows)
    front = _choose_front(options.metric, rows)
    total: JsonObject = asdict(sum_costs("all", costs, [None] * len(costs))) if costs else {}
    unknown = [r.path for r, cost in zip(records, costs, strict=True) if cost.paid_s is None]
    if options.json:
        published = [_publish(row, number in front) for number, row in enumerate(rows)]
        if not options.by:
            pairs = zip(costs, published, strict=True)
            published = [{**asdict(cost), **row, "path": row["name"]} for cost, row in pairs]
        kept = {name: total.get(name) for name in ("paid_s", "device_hours", "usd", "is_least")}
        kept["unknown"] = unknown
        print_json({"groups" if options.by else "runs": published, "total": kept})
        return
    _print_table(options, rows, front, [] if options.by else costs)
    least = "at least " if total.get("is_least") else ""
    hours = _format_hours(total.get("device_hours"))
    print(f"\nall together: {least}{hours} device-hours, USD {_format_usd(total.get('usd'))}")
    warnings = []
    if unknown:
        counts = f"{len(unknown)} of {len(records)} runs"
        warnings.append(f"unknown of {counts}, which record no attempts: {name_few(unknown)}")
    if prices:
        unpriced = sorted({name for cost in costs for name in cost.unpriced})
        warnings += [f"no price for {name} on the days of these runs" for name in unpriced]
    for text in warnings:
        create_console().print(Text(text, style="yellow"))


def _read_records(options: argparse.Namespace) -> list[RunRecord]:
    """Open the named runs, or those of the filter without damaged ones, which are logged."""
    if not options.filter:
        return [RunRecord(path) for path in find_paths(options, options.runs)]
    selector = RunSelector(open_index(options))
    if damaged := selector.find_faulty():
        get_logger().warning("left out, as damaged or too new: %s; see list", name_few(damaged))
    return selector.open(selector.select_paths(options.filter))


def group_costs(
    options: argparse.Namespace, records: Sequence[RunRecord], costs: Sequence[RunCost]
) -> list[CostRow]:
    """Create a row for each run, or for each value of the keys of `--by`."""
    keys = [key.strip() for key in options.by.split(",") if key.strip()]
    if options.by and not keys:
        raise UserError(f"--by {options.by!r} names no key; give some such as optim.lr")
    tables = [{**record.config, **describe(record.facts, record.path)} for record in records]
    check_keys(keys, {name for table in tables for name in table}, "--by")
    groups: dict[str, list[int]] = {}
    for number, (record, table) in enumerate(zip(records, tables, strict=True)):
        values = (format_value(table.get(key)) or '""' for key in keys)
        name = ", ".join(f"{key}={value}" for key, value in zip(keys, values, strict=True))
        groups.setdefault(name if keys else f"{number} {record.path}", []).append(number)
    rows = []
    for name, numbers in groups.items():
        values = [records[number].values.get(options.metric) for number in numbers]
        title = name if keys else records[numbers[0]].path
        rows.append(sum_costs(title, [costs[number] for number in numbers], values))
    return rows


def _compare_with_base(options: argparse.Namespace, rows: Sequence[CostRow]) -> list[CostRow]:
    entry = find_entry(options.metric) if options.metric else None
    if entry is None or entry.direction == "none":
        raise UserError(
            f"--base needs a --metric with a better direction, got {options.metric!r}; give one "
            "such as eval.top1"
        )
    matches = [row for row in rows if options.base in (row.name, row.name.rpartition("/")[2])]
    if len(matches) != 1:
        hint = get_hint(options.base, [row.name for row in rows])
        raise UserError(f"--base {options.base!r} is {len(matches)} of these rows; {hint}")
    is_higher = entry.direction == "higher"
    return [hold_against(row, matches[0], is_higher_better=is_higher) for row in rows]


def _choose_front(metric: str, rows: Sequence[CostRow]) -> set[int]:
    """Return the rows on the Pareto front of cost (hours unless all have prices) and metric."""
    entry = find_entry(metric) if metric else None
    if entry is None or entry.direction == "none":
        return set()
    if any(row.usd is None for row in rows if row.spent is not None):
        rows = [replace(row, usd=None) for row in rows]
    points = [
        None
        if row.value is None or row.spent is None or not math.isfinite(row.value)
        else (row.spent, row.value)
        for row in rows
    ]
    return find_front(points, is_higher_better=entry.direction == "higher")


def _publish(row: CostRow, is_on_front: bool) -> JsonObject:
    points = {"hours_per_point": row.hours_per_point, "usd_per_point": row.usd_per_point}
    return {**asdict(row), **points, "is_on_front": is_on_front}


def _print_table(
    options: argparse.Namespace, rows: Sequence[CostRow], front: set[int], costs: Sequence[RunCost]
) -> None:
    titles = ["paid>", "device-hours>", "USD>", "goodput>" if costs else "runs>"]
    titles += [f"{options.metric}>", ""] if options.metric else []
    titles += ["gain>", "hours a point>", "USD a point>"] if options.base else []
    table = create_table("runs of" if options.by else "run", *titles)
    for number, row in enumerate(rows):
        hours = "≥ " * row.is_least * (row.device_hours is not None)
        hours += _format_hours(row.device_hours)
        cells = [format_least(row.paid_s, is_least=row.is_least), hours, _format_usd(row.usd)]
        goodput = costs[number].goodput if costs else None
        cells.append(str(row.runs) if not costs else "-" if goodput is None else f"{goodput:.1%}")
        if options.metric:
            cells += [format_value(row.value), "front" if number in front else ""]
        if options.base:
            cells.append("-" if row.gain is None else f"{row.gain:+.4g}")
            cells += [format_value(row.hours_per_point), _format_usd(row.usd_per_point)]
        table.add_row(row.name, *cells)
    create_console().print(table)


def _format_hours(hours: float | None) -> str:
    return "-" if hours is None else f"{hours:.3f}"


def _format_usd(usd: float | None) -> str:
    return "-" if usd is None else f"{usd:,.2f}"
