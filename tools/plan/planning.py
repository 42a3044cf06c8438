"""Plans a run on all slices: what `python -m tools.plan` runs."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict

from bill.plan_feed import measure_cpu_ms
from bill.plan_load import measure_load, read_numbers
from bill.plan_table import list_budget, print_plans
from store.formatting import name_few
from store.quality.costs import DevicePrice, read_prices, read_store_prices
from store.quality.goodput import ASSUMED_RESTART_S, ASSUMED_RESUME_S, Interruptions
from store.quality.list_prices import check_region, find_chip_prices, list_missing, read_price_list
from store.quality.past_runs import read_past_runs
from store.quality.slices import (
    Assumptions,
    Load,
    RentedSlice,
    SlicePlan,
    list_slices,
    plan_slices,
)
from store.terminal import print_json
from utils.config.load import RunConfig, load_config
from utils.errors import UserError
from utils.generations import find_generation
from utils.json_types import JsonObject
from utils.programs import get_run_flags, require_at_least

_MINUTE_S = 60.0
_SHORT_S = 0.005


def run(options: argparse.Namespace) -> None:
    """Print the plan of the flags."""
    require_at_least(1, options, "max_chips")
    require_at_least(0, options, "preemptions_per_day", "restart_minutes", "resume_minutes")
    for flag in ("budget", "cpu_ms"):
        value = getattr(options, flag)
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"--{flag.replace('_', '-')} ({value:g}) must be above 0; change it")
    config = load_config(get_run_flags(options))
    slices = choose_slices(options)
    own, notes = _read_own_prices(options, config)
    examples = read_numbers("--examples", options.examples)
    load = measure_load(config, examples, read_numbers("--assume", options.assume))
    assumptions, assumed = gather(options, config, own)
    plans = plan_slices(load, slices, assumptions)
    notes += [*assumed, *_describe_prices(plans, assumptions), _describe_time(plans)]
    if options.json:
        print_json(describe(load, plans, options.budget, notes))
        return
    print_plans(load, plans, notes)
    if options.budget is not None:
        print("\n".join(list_budget(load, plans, options.budget)))


def choose_slices(options: argparse.Namespace) -> list[RentedSlice]:
    """Return the slices of the flags; UserError for one that does not exist."""
    if not options.slices:
        return list_slices(options.max_chips)
    for name in options.slices:
        find_generation(name)
    return [item for item in list_slices(10**6) if item.name in options.slices]


def gather(
    options: argparse.Namespace, config: RunConfig, own: list[DevicePrice]
) -> tuple[Assumptions, list[str]]:
    """Gather what the plan assumes, from the flags, the store and this project's tables."""
    check_region(options.region)
    store = options.store or config.run.output_dir
    past = read_past_runs(store, config.model_dump(mode="json"))
    pauses, source = past.pauses, "this store's runs"
    if pauses is None:
        pauses, source = (ASSUMED_RESTART_S, ASSUMED_RESUME_S), "assumed"
    restart_s, resume_s = (
        seconds if minutes is None else minutes * _MINUTE_S
        for seconds, minutes in zip(
            pauses, (options.restart_minutes, options.resume_minutes), strict=True
        )
    )
    cpu_ms, origin = options.cpu_ms, "as given"
    if cpu_ms is None:
        cpu_ms, origin = measure_cpu_ms(config)
    rate = options.preemptions_per_day
    notes = [
        f"a start takes {resume_s / _MINUTE_S:.3g} min, a new machine {restart_s / _MINUTE_S:.3g} "
        f"(flags, else {source})",
        f"spot: {rate:g} preemptions a day"
        if rate
        else "spot: no preemption is counted; state a rate by --preemptions-per-day",
    ]
    if cpu_ms is not None:
        notes.append(f"hosts: {cpu_ms:.3g} ms an image of one core, {origin} (docs/data.md)")
    interruptions = Interruptions(rate, restart_s, resume_s, seed=options.seed)
    return (
        Assumptions(
            own,
            options.region,
            interruptions=interruptions,
            cpu_ms=cpu_ms,
            past=past,
        ),
        notes,
    )


def describe(
    load: Load, plans: list[SlicePlan], budget: float | None, notes: list[str]
) -> JsonObject:
    """Return the plan as a JSON object."""
    rows: list[JsonObject] = []
    for plan in plans:
        row = {"slice": plan.slice.name, "chips": plan.slice.chips, "refusal": plan.refusal}
        row |= {name: getattr(plan, name) for name in ("examples", "parts", "memory_bytes", "feed")}
        bills = [{**asdict(bill), "usd": bill.usd, "goodput": bill.goodput} for bill in plan.bills]
        step = None if plan.step is None else asdict(plan.step)
        rows.append({**row, "step": step, "bills": bills, "has_no_end": plan.has_no_end})
    run = {**asdict(load.work), "epochs": load.epochs, "train_flops": load.train_flops}
    run |= {"checkpoint_bytes": load.checkpoint_bytes}
    bought: list[str] = [] if budget is None else list_budget(load, plans, budget)
    return {"run": run, "slices": rows, "budget": bought, "notes": notes}


def _read_own_prices(
    options: argparse.Namespace, config: RunConfig
) -> tuple[list[DevicePrice], list[str]]:
    if options.prices:
        return read_prices(options.prices), [f"own prices: {options.prices}"]
    own, _ = read_store_prices(options.store or config.run.output_dir)
    return own, ["own prices: prices.yaml in the store"] if own else []


def _describe_prices(plans: list[SlicePlan], assumptions: Assumptions) -> list[str]:
    generations = dict.fromkeys(plan.slice.generation.name for plan in plans)
    missing = [
        text
        for name in generations
        for text in list_missing(
            name, find_chip_prices(name, assumptions.own_prices, 0, assumptions.region)
        )
    ]
    lines = [read_price_list().describe()]
    return [*lines, f"no price is known of {name_few(missing)}"] if missing else lines


def _describe_time(plans: list[SlicePlan]) -> str:
    """Describe where the time of a step and its range are from."""
    bases = sorted({plan.step.basis for plan in plans if plan.step is not None})
    times = [plan.step.estimate_s for plan in plans if plan.step is not None]
    short = "; dispatch by the host is not in it, which counts in steps below 5 ms"
    short *= min(times, default=math.inf) < _SHORT_S
    return f"time of a step: {'; '.join(bases) or 'unknown'}{short}"
