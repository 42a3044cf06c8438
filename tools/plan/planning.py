"""Plans a run on all slices: what `python -m tools.plan` runs."""

from __future__ import annotations

import argparse
import math
import statistics
from dataclasses import asdict

from bill.plan_load import find_cpu_ms, measure_load, read_numbers
from bill.plan_table import list_budget, print_plans
from bill.published import PUBLISHED
from store.formatting import name_few
from store.quality.calibration import calibrate, hash_step, measure_step
from store.quality.costs import DevicePrice, read_prices, read_store_prices
from store.quality.goodput import ASSUMED_RESTART_S, ASSUMED_RESUME_S, Interruptions
from store.quality.list_prices import check_region, find_chip_prices, list_missing, read_price_list
from store.quality.slices import (
    Assumptions,
    Load,
    RentedSlice,
    SlicePlan,
    list_slices,
    plan_slices,
)
from store.quality.trends import read_verdicts
from store.query.record import RunRecord
from store.query.timeline import list_attempts, list_downs, make_windows
from store.record.attempts import count_devices, read_hardware
from store.terminal import print_json
from tools.runs.quality import find_point
from utils.config.load import RunConfig, load_config
from utils.errors import UserError
from utils.generations import find_generation
from utils.json_types import JsonObject
from utils.programs import get_run_flags, require_at_least
from utils.storage.places import is_remote, to_path

_MINUTE_S = 60.0
_MOST_RUNS = 50
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
    notes += [*assumed, *_describe_prices(plans, assumptions), _describe_time(plans, assumptions)]
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
    records = read_records(store, config)
    verdicts = read_verdicts(store)
    points = [point for record in records if (point := find_point(record, verdicts))]
    pauses, source = measure_pauses(records), "this store's runs"
    if pauses is None:
        pauses, source = (ASSUMED_RESTART_S, ASSUMED_RESUME_S), "assumed"
    restart_s, resume_s = (
        seconds if minutes is None else minutes * _MINUTE_S
        for seconds, minutes in zip(
            pauses, (options.restart_minutes, options.resume_minutes), strict=True
        )
    )
    cpu_ms, form = find_cpu_ms(config)
    given = options.cpu_ms
    rate = options.preemptions_per_day
    notes = [
        f"a start takes {resume_s / _MINUTE_S:.3g} min, a new machine {restart_s / _MINUTE_S:.3g} "
        f"(flags, else {source})",
        f"spot: {rate:g} preemptions a day"
        if rate
        else "spot: no preemption is counted; state a rate by --preemptions-per-day",
    ]
    if given is not None or cpu_ms is not None:
        cost = f"{given:g} ms, as given" if given is not None else f"{cpu_ms:g} ms, {form}"
        notes.append(f"hosts: {cost} an image of one core, crop and flip alone (docs/data.md)")
    interruptions = Interruptions(rate, restart_s, resume_s, seed=options.seed)
    return (
        Assumptions(
            own,
            options.region,
            interruptions=interruptions,
            cpu_ms=given if given is not None else cpu_ms,
            verdicts=verdicts,
            calibration=calibrate(points),
            measured=find_measured(records, config),
        ),
        notes,
    )


def read_records(store: str, config: RunConfig) -> list[RunRecord]:
    """Read complete runs of the configuration's experiment, the newest first."""
    if is_remote(store):
        return []
    folders = sorted((to_path(store) / config.run.experiment).glob("*/run.json"))
    records = [RunRecord(path.parent) for path in folders[-_MOST_RUNS:]]
    complete = [record for record in records if record.is_complete]
    return sorted(complete, key=lambda record: record.facts.started or 0.0, reverse=True)


def find_measured(
    records: list[RunRecord], config: RunConfig
) -> dict[tuple[str, int], tuple[float, str]]:
    """Find seconds of this very step in finished runs, by generation and number of devices."""
    values = config.model_dump(mode="json")
    wanted = (hash_step(values), config.data.global_batch_size)
    times: dict[tuple[str, int], tuple[float, str]] = {}
    for record in records:
        if (hash_step(record.config), record.config.get("data.global_batch_size")) != wanted:
            continue
        hardware = read_hardware(record.facts, record.attempts[-1] if record.attempts else {})
        chip = str(hardware.get("chip") or hardware.get("hardware") or "").removeprefix("TPU ")
        step_s = measure_step(record)
        if step_s is not None:
            times.setdefault((chip, count_devices(hardware)), (step_s, record.path))
    return times


def measure_pauses(records: list[RunRecord]) -> tuple[float, float] | None:
    """Measure seconds between attempts, and from a start to its first step; None if unknown."""
    downs: list[float] = []
    starts: list[float] = []
    for record in records:
        attempts = list_attempts(record)
        downs += [began - ended for ended, began in list_downs(attempts)]
        windows = make_windows(record, attempts)
        for attempt in attempts:
            first = min((w.began for w in windows if w.attempt == attempt.number), default=None)
            starts += [] if first is None else [max(0.0, first - attempt.began)]
    if not downs or not starts:
        return None
    return statistics.median(downs), statistics.median(starts)


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


def _describe_time(plans: list[SlicePlan], assumptions: Assumptions) -> str:
    """Describe where the time of a step is from, and what its range means."""
    bases = sorted({plan.step.basis for plan in plans if plan.step is not None})
    spread = f"{len(PUBLISHED)} steps of published speed"
    if assumptions.calibration is not None:
        spread = f"{assumptions.calibration.n} runs of this store"
    times = [plan.step.estimate_s for plan in plans if plan.step is not None]
    short = "; dispatch by the host is not in it, which counts in steps below 5 ms"
    short *= min(times, default=math.inf) < _SHORT_S
    return f"time of a step: {', '.join(bases) or 'unknown'}; range: {spread}{short}"
