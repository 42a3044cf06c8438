"""`cost`: what runs have cost, and which give most for it."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict

from store.compare.sides import find_entry
from store.costs import RunCost, compute_cost, find_front, read_prices
from store.filters import check_keys
from store.record import RunRecord
from store.wording import format_duration, format_value
from tools.runs.comparing import open_run, select_paths
from tools.runs.places import find_records
from tools.runs.printing import create_console, create_table, print_json
from utils.errors import UserError
from utils.json_types import JsonObject


def show_costs(options: argparse.Namespace) -> None:
    """Print what each run has cost, and all together.

    Raises:
      UserError: no such run or number, or a table of prices with a fault.
    """
    if bool(options.runs) == bool(options.filter):
        raise UserError("cost: give RUNs or --filter, one of them; --filter path is all runs")
    prices = read_prices(options.prices) if options.prices else []
    records: list[RunRecord] = find_records(options, options.runs)
    if options.filter:
        records = [open_run(options, path) for path in select_paths(options, options.filter)]
    if options.metric:
        check_keys([options.metric], {n for r in records for n in r.values}, "--metric")
    costs = [compute_cost(record, prices) for record in records]
    values = [record.values.get(options.metric) for record in records]
    front = _choose_front(options.metric, costs, values)
    rows: list[JsonObject] = [
        {"path": record.path, **asdict(cost), "value": value, "is_on_front": place in front}
        for place, (record, cost, value) in enumerate(zip(records, costs, values, strict=True))
    ]
    total = {
        "paid_s": math.fsum(one.paid_s for one in costs),
        "device_hours": math.fsum(one.device_hours for one in costs),
        "usd": None if any(one.usd is None for one in costs) else math.fsum(c.usd for c in costs),
    }
    if options.json:
        print_json({"runs": rows, "total": total})
    else:
        _print_table(rows, total, options.metric, has_prices=bool(prices))


def _choose_front(metric: str, costs: list[RunCost], values: list[float | None]) -> set[int]:
    """Runs that no other one beats in cost and number; without prices hours count."""
    entry = find_entry(metric) if metric else None
    if entry is None or entry.direction == "none":
        return set()
    is_priced = all(one.usd is not None for one in costs)
    spent = [one.usd if is_priced else one.device_hours for one in costs]
    points = [
        None if value is None or not math.isfinite(value) else (cost, value)
        for cost, value in zip(spent, values, strict=True)
    ]
    return find_front(points, is_higher_better=entry.direction == "higher")


def _print_table(
    rows: list[JsonObject], total: JsonObject, metric: str, *, has_prices: bool
) -> None:
    console = create_console()
    more = [f"{metric}>", ""] if metric else []
    table = create_table("run", "paid>", "device-hours>", "USD>", "goodput>", *more)
    for row in rows:
        at_least = "≥ " if row["is_least"] else ""
        goodput = "-" if row["goodput"] is None else f"{row['goodput']:.1%}"
        paid, hours = format_duration(row["paid_s"]), f"{row['device_hours']:.3f}"
        cells = [at_least + paid, at_least + hours, _format_usd(row["usd"]), goodput]
        if metric:
            cells += [format_value(row["value"]), "front" if row["is_on_front"] else ""]
        table.add_row(row["path"], *cells)
    console.print(table)
    hours, usd = total["device_hours"], _format_usd(total["usd"])
    console.print(f"\nall together: {hours:.3f} device-hours, USD {usd}")
    for name in sorted({name for row in rows for name in row["unpriced"]}) if has_prices else ():
        console.print(f"no price for {name} on the days of these runs", style="yellow")


def _format_usd(usd: float | None) -> str:
    return "-" if usd is None else f"{usd:,.2f}"
