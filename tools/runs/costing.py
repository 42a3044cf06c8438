"""`cost`: what runs and sweeps have cost, which give most for it, and what a point costs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, replace

from rich.text import Text

from store.formatting import format_least, format_value
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
from store.record.catalogue import find_entry
from store.terminal import create_console, create_table, print_json
from tools.runs.places import find_records, open_run, select_whole, warn_of_damage
from utils.errors import UserError, get_hint
from utils.json_types import JsonObject, JsonValue

_MOST_NAMED = 6


def show_costs(options: argparse.Namespace) -> None:
    """Print what each run, or each group of runs, has cost, and all together.

    Raises:
      UserError: no such run, number or key, or a table of prices with a fault.
    """
    if bool(options.runs) == bool(options.filter):
        raise UserError("cost: give RUNs or --filter, one of them; --filter path is all runs")
    prices = read_prices(options.prices) if options.prices else []
    records: list[RunRecord] = find_records(options, options.runs)
    if options.filter:
        records = [open_run(options, path) for path in select_whole(options)]
    warn_of_damage(records)
    if options.metric:
        check_keys([options.metric], {n for r in records for n in r.values}, "--metric")
    costs = [compute_cost(record, prices) for record in records]
    rows = group_costs(options, records, costs)
    if options.base:
        rows = _hold_against(options, rows)
    front = _choose_front(options.metric, rows)
    total = asdict(sum_costs("all", costs, [None] * len(costs))) if costs else {}
    if options.json:
        told = [_publish(row, place in front) for place, row in enumerate(rows)]
        if not options.by:
            told = [{**asdict(cost), **row, "path": row["name"]}
                    for cost, row in zip(costs, told, strict=True)]  # fmt: skip
        kept = {name: total.get(name) for name in ("paid_s", "device_hours", "usd", "is_least")}
        kept["unknown"] = _list_unknown(records, costs)
        print_json({"groups" if options.by else "runs": told, "total": kept})
        return
    _print_table(options, rows, front, [] if options.by else costs)
    _print_total(total, _list_unknown(records, costs), len(records))
    for name in sorted({name for one in costs for name in one.unpriced}) if prices else ():
        create_console().print(
            Text(f"no price for {name} on the days of these runs", style="yellow")
        )


def _list_unknown(records: Sequence[RunRecord], costs: Sequence[RunCost]) -> list[str]:
    """Runs of which nobody knows how long programs have worked on them."""
    return [r.path for r, one in zip(records, costs, strict=True) if one.paid_s is None]


def _print_total(total: JsonObject, unknown: Sequence[str], count: int) -> None:
    least = "at least " if total.get("is_least") else ""
    hours, usd = total.get("device_hours"), _format_usd(total.get("usd"))
    known = "-" if hours is None else f"{hours:.3f}"
    print(f"\nall together: {least}{known} device-hours, USD {usd}")
    if unknown:
        paths = ", ".join(unknown[:_MOST_NAMED]) + (", ..." if len(unknown) > _MOST_NAMED else "")
        create_console().print(
            f"unknown of {len(unknown)} of {count} runs, which tell no attempts: {paths}",
            style="yellow",
        )


def group_costs(
    options: argparse.Namespace, records: Sequence[RunRecord], costs: Sequence[RunCost]
) -> list[CostRow]:
    """A row for each run, or for each value of the keys of `--by`.

    Raises:
      UserError: a key that no run has.
    """
    keys = [key.strip() for key in options.by.split(",") if key.strip()]
    if options.by and not keys:
        raise UserError(f"--by {options.by!r} names no key; give some such as optim.lr")
    tables = [{**record.config, **describe(record.facts, record.path)} for record in records]
    check_keys(keys, {name for one in tables for name in one}, "--by")
    groups: dict[str, list[int]] = {}
    for place, (record, table) in enumerate(zip(records, tables, strict=True)):
        name = ", ".join(f"{key}={_name_value(table.get(key))}" for key in keys) or record.path
        groups.setdefault(name if keys else f"{place} {name}", []).append(place)
    rows = []
    for name, places in groups.items():
        values = [records[place].values.get(options.metric) for place in places]
        title = name if keys else records[places[0]].path
        rows.append(sum_costs(title, [costs[place] for place in places], values))
    return rows


def _hold_against(options: argparse.Namespace, rows: Sequence[CostRow]) -> list[CostRow]:
    entry = find_entry(options.metric) if options.metric else None
    if entry is None or entry.direction == "none":
        raise UserError(
            f"--base: --metric ({options.metric!r}) has no better direction, so nothing is gained; "
            "give one such as eval.top1"
        )
    fits = [one for one in rows if options.base in (one.name, one.name.rpartition("/")[2])]
    if len(fits) != 1:
        hint = get_hint(options.base, [one.name for one in rows])
        raise UserError(f"--base {options.base!r} is {len(fits)} of these rows; {hint}")
    is_higher = entry.direction == "higher"
    return [hold_against(one, fits[0], is_higher_better=is_higher) for one in rows]


def _choose_front(metric: str, rows: Sequence[CostRow]) -> set[int]:
    """Rows that no other one beats in cost and number; without prices of all hours count."""
    entry = find_entry(metric) if metric else None
    if entry is None or entry.direction == "none":
        return set()
    if any(one.usd is None for one in rows if one.spent is not None):
        rows = [replace(one, usd=None) for one in rows]
    points = [
        None
        if one.value is None or one.spent is None or not math.isfinite(one.value)
        else (one.spent, one.value)
        for one in rows
    ]
    return find_front(points, is_higher_better=entry.direction == "higher")


def _publish(row: CostRow, is_on_front: bool) -> JsonObject:
    points = {"hours_per_point": row.hours_per_point, "usd_per_point": row.usd_per_point}
    return {**asdict(row), **points, "is_on_front": is_on_front}


def _print_table(
    options: argparse.Namespace, rows: Sequence[CostRow], front: set[int], costs: Sequence[RunCost]
) -> None:
    is_based = bool(options.base)
    titles = ["paid>", "device-hours>", "USD>", "goodput>" if costs else "runs>"]
    titles += [f"{options.metric}>", ""] if options.metric else []
    titles += ["gain>", "hours a point>", "USD a point>"] if is_based else []
    table = create_table("runs of" if options.by else "run", *titles)
    for place, row in enumerate(rows):
        at_least = "≥ " if row.is_least else ""
        hours = "-" if row.device_hours is None else f"{at_least}{row.device_hours:.3f}"
        paid = format_least(row.paid_s, is_least=row.is_least)
        cells = [paid, hours, _format_usd(row.usd)]
        goodput = costs[place].goodput if costs else None
        cells.append(str(row.runs) if not costs else "-" if goodput is None else f"{goodput:.1%}")
        if options.metric:
            cells += [format_value(row.value), "front" if place in front else ""]
        if is_based:
            cells.append("-" if row.gain is None else f"{row.gain:+.4g}")
            cells += [format_value(row.hours_per_point), _format_usd(row.usd_per_point)]
        table.add_row(row.name, *cells)
    create_console().print(table)


def _name_value(value: JsonValue) -> str:
    return format_value(value) or '""'


def _format_usd(usd: float | None) -> str:
    return "-" if usd is None else f"{usd:,.2f}"
