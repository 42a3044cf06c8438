"""The plan of a run: for each slice whether it fits, its time, its hosts and its bills."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from store.quality.bill import Bill, Rental, RunWork, StepTime, compute_bill, format_usd
from store.quality.calibration import Verdicts, hash_step
from store.quality.costs import DevicePrice
from store.quality.goodput import NEVER, Interruptions
from store.quality.list_prices import OWN, TERMS, find_chip_prices
from store.quality.past_runs import PastRuns
from utils.generations import LAUNCHED, Generation
from utils.hosts import count_vcpus
from utils.json_types import JsonObject

# Time of steps of published speed over the sum of their FLOPs at the chip's peak and of their bytes
# at its bandwidth: least, geometric mean and most, of `bill.published.PUBLISHED` (a test).
PUBLISHED_FACTORS = (1.66, 2.43, 4.16)
_TRAFFIC = 2  # what is kept for the backward pass is written and read, and so is the state
_CORES = 2  # in a chip whose accelerator types count cores


@dataclass(frozen=True)
class Load:
    """A run as the plan sees it: numbers of its configuration, and counts of its step."""

    values: JsonObject  # the configuration
    work: RunWork
    epochs: float
    parts: int | None  # micro-batches; None to choose the fewest that fit
    train_flops: float | None  # of an example; None if unknown
    state_bytes: int  # that each device keeps
    checkpoint_bytes: int
    example_bytes: int | None  # of each example of a micro-batch


@dataclass(frozen=True)
class RentedSlice:
    """A slice that may be rented."""

    name: str  # accelerator type
    generation: Generation
    chips: int

    @property
    def devices(self) -> int:
        """Devices that the compiler sees: both cores of v4."""
        return self.chips * self.generation.devices_per_chip


@dataclass(frozen=True)
class Assumptions:
    """What a plan takes from elsewhere."""

    own_prices: Sequence[DevicePrice] = ()
    region: str = ""
    terms: tuple[str, ...] = (*TERMS, OWN)  # those that are billed
    interruptions: Interruptions = NEVER
    cpu_ms: float | None = None  # an example costs on the host; None if unknown
    past: PastRuns = field(default_factory=PastRuns)  # of the store


@dataclass(frozen=True)
class SlicePlan:
    """A run on one slice."""

    slice: RentedSlice
    refusal: str  # why it does not fit; empty if it does
    examples: int = 0  # of a step on one device
    parts: int = 1
    memory_bytes: int | None = None  # of a device; None if unknown
    step: StepTime | None = None  # None if neither FLOPs nor a verdict are known
    feed: float | None = None  # examples of the hosts over those of the chips, by the estimate
    bills: tuple[Bill, ...] = ()  # one for each known price, else one without
    has_no_end: bool = False  # a preemption is nearly sure before the first checkpoint


def list_slices(most_chips: int) -> list[RentedSlice]:
    """List all slices up to a number of chips, the oldest generation first."""
    slices = [
        RentedSlice(
            f"{row.prefix}-{number}", row, number // (_CORES if row.counts == "cores" else 1)
        )
        for row in LAUNCHED
        for number in row.numbers
    ]
    return [item for item in slices if item.chips <= most_chips]


def plan_slices(
    load: Load, slices: Sequence[RentedSlice], assumptions: Assumptions
) -> list[SlicePlan]:
    """Plan a run on each slice."""
    step = hash_step(load.values)
    return [_plan(load, item, assumptions, step) for item in slices]


def list_bills(plans: Sequence[SlicePlan]) -> Iterator[tuple[SlicePlan, Bill]]:
    """Yield each bill with its plan."""
    return ((plan, bill) for plan in plans for bill in plan.bills)


def find_cheapest(plans: Sequence[SlicePlan]) -> tuple[SlicePlan, Bill] | None:
    """Find the bill of the least money by the estimate; None without a price."""
    priced = [pair for pair in list_bills(plans) if pair[1].usd is not None]
    return min(priced, key=lambda pair: (pair[1].usd, pair[1].wall_hours), default=None)


def find_fastest(
    plans: Sequence[SlicePlan], usd: float | None = None
) -> tuple[SlicePlan, Bill] | None:
    """Find the bill that ends first, of those within a budget; None if all cost more."""
    kept = [
        pair
        for pair in list_bills(plans)
        if usd is None or (pair[1].usd is not None and pair[1].usd <= usd)
    ]
    return min(kept, key=lambda pair: (pair[1].wall_hours, pair[1].usd or 0.0), default=None)


def describe_bill(name: str, bill: Bill) -> str:
    """Describe a bill in a line: hours and money with their ranges, the price's term, the basis."""
    hours, money = f"{bill.hours:.3g} h", "no price is known"
    if bill.has_range:
        hours += f" (bound {bill.bound_hours:.3g}, {bill.low_hours:.3g} to {bill.high_hours:.3g})"
    if bill.usd is not None:
        place = f" in {bill.rental.region}" if bill.rental.region else ""
        term = f"{bill.rental.term.replace('_', ' ')}{place}"
        money = f"{format_usd(bill)} {term}".rstrip()
    return f"{name} {hours}, {money} ({bill.basis})"


def describe_plans(plans: Sequence[SlicePlan]) -> list[str]:
    """Name the cheapest and the fastest bill; empty if none is known."""
    best = {"cheapest": find_cheapest(plans), "fastest": find_fastest(plans)}
    return [
        f"{which}: {describe_bill(pair[0].slice.name, pair[1])}"
        for which, pair in best.items()
        if pair is not None
    ]


def _plan(load: Load, item: RentedSlice, assumptions: Assumptions, step: str) -> SlicePlan:
    batch = load.work.batch
    if batch % item.devices:
        return SlicePlan(item, f"a batch of {batch} on {item.devices} devices")
    examples = batch // item.devices
    verdict = _find_verdict(item, examples, assumptions.past.verdicts, step)
    usable = item.generation.usable_gib * 2**30
    if verdict is not None:
        parts, memory = load.parts or 1, verdict["memory"]["peak_bytes"]
    else:
        parts, memory = _choose_parts(load, examples, usable)
    if parts is None or (memory or 0) > usable:
        return SlicePlan(item, "memory", examples, parts or 1, memory)
    time_s = _time_step(load, item, examples, verdict, assumptions)
    if time_s is None:
        return SlicePlan(item, "", examples, parts, memory)
    vcpus = count_vcpus(item.generation.name, item.chips)
    rate = None
    if vcpus is not None and assumptions.cpu_ms:
        rate = vcpus * 1000 / assumptions.cpu_ms
    prices = find_chip_prices(
        item.generation.name, assumptions.own_prices, time.time(), assumptions.region
    )
    name = f"TPU {item.generation.name}"
    rentals = [
        Rental(name, item.chips, price.usd, price.term, price.region)
        for price in prices
        if price.term in assumptions.terms
    ]
    bills = [
        compute_bill(load.work, time_s, rental, assumptions.interruptions, rate)
        for rental in rentals or [Rental(name, item.chips, None)]
    ]
    return SlicePlan(
        item,
        "",
        examples,
        parts,
        memory,
        time_s,
        None if rate is None else rate * time_s.estimate_s / batch,
        tuple(bill for bill in bills if bill is not None),
        None in bills,
    )


def _find_verdict(
    item: RentedSlice, examples: int, verdicts: Verdicts, step: str
) -> JsonObject | None:
    keys = ((item.generation.name, chips, examples, step) for chips in (item.devices, 1))
    return next((verdicts[key] for key in keys if key in verdicts), None)


def _choose_parts(load: Load, examples: int, usable: float) -> tuple[int | None, int | None]:
    """Return micro-batches and bytes of a device; None micro-batches if none fit."""
    if load.example_bytes is None:
        return load.parts or 1, None
    parts = load.parts or 1
    memory = load.state_bytes + examples // parts * load.example_bytes
    while (
        load.parts is None
        and memory > usable
        and parts * 2 <= examples
        and not examples % (2 * parts)
    ):
        parts *= 2
        memory = load.state_bytes + examples // parts * load.example_bytes
    return (parts if not examples % parts else None), memory


def _time_step(
    load: Load,
    item: RentedSlice,
    examples: int,
    verdict: JsonObject | None,
    assumptions: Assumptions,
) -> StepTime | None:
    """Return the time of a step: of a finished run, else the compiler's, else by FLOPs."""
    row = item.generation
    taken = assumptions.past.measured.get((row.name, item.chips * row.seen_per_chip))
    if taken is not None:
        return StepTime.exact(taken[0], f"measured in {taken[1]}")
    if verdict is not None and verdict.get("step_ms"):
        return StepTime.by_compiler(verdict, assumptions.past.calibrations)
    if load.train_flops is None:
        return None
    counted_s, bound_s = count_time(load, row, examples)
    low, mean, high = PUBLISHED_FACTORS
    times = (bound_s, counted_s * mean, counted_s * low, counted_s * high)
    return StepTime(*times, "counted FLOPs and bytes, range of published steps")


def count_time(load: Load, row: Generation, examples: int) -> tuple[float, float]:
    """Count seconds of a step by FLOPs and bytes, one after the other, and by FLOPs alone."""
    flops_s = examples * (load.train_flops or 0.0) / (row.peak_tflops * 1e12)
    moved = _TRAFFIC * (load.state_bytes + examples * (load.example_bytes or 0))
    return flops_s + moved / (row.hbm_gb_per_s * 1e9), flops_s
