"""The bill of a run before it starts: hours and money on rented devices.

`compute_bill` is the only place that computes them; the plan of all slices, `main.py --check`,
sweeps and the dashboard differ in where a step's time comes from: a finished run, the compiler, or
a count of FLOPs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from store.quality.calibration import Calibration, hash_step
from store.quality.costs import DevicePrice, compute_cost, find_price
from store.quality.goodput import NEVER, Interruptions, Simulation, simulate
from store.quality.list_prices import SPOT, ChipPrice, find_chip_prices
from store.query.record import RunRecord
from store.record.attempts import count_devices, read_hardware
from utils.generations import GENERATIONS
from utils.json_types import JsonObject

# Time of steps of published speed over the compiler's estimate, least and most, of
# `bill.published.PUBLISHED`, which a test holds.
PUBLISHED_RATIOS = (0.82, 1.32)
_FEWEST_RUNS = 3  # whose ratios are a range of their own
_HOUR_S = 3600.0


@dataclass(frozen=True)
class RunWork:
    """What a run does, wherever it runs."""

    steps: int
    batch: int = 1  # examples of a step
    evaluations: int = 0
    eval_batches: int = 0  # of one evaluation
    eval_share: float = 0.0  # cost of a batch of evaluation, as a share of a step
    checkpoints: int = 0
    held_s: float = 0.0  # how long one holds the loop


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: a bound, an estimate, and how far the estimate may be off."""

    bound_s: float
    estimate_s: float
    low_s: float
    high_s: float
    basis: str  # origin of the times

    @classmethod
    def exact(cls, step_s: float, basis: str) -> Self:
        """Return a measured time."""
        return cls(step_s, step_s, step_s, step_s, basis)

    @classmethod
    def by_compiler(cls, verdict: JsonObject, calibrations: Mapping[str, Calibration]) -> Self:
        """Return the time of a verdict, with the range of the chip's calibration if it has one.

        Args:
          calibrations: of the store's own runs, by generation. Few runs widen the range that
            published steps have, and do not replace it.
        """
        bound_s, estimate_s = (verdict["step_ms"][name] / 1000 for name in ("lower", "estimate"))
        chip = str(verdict.get("target", "")).partition(":")[0]
        own = calibrations.get(chip)
        if own is None:
            low, high = PUBLISHED_RATIOS
            times = (bound_s, estimate_s, estimate_s * low, estimate_s * high)
            return cls(*times, "compiler's verdict, range of published steps")
        low, high = own.low, own.high
        if own.n < _FEWEST_RUNS:
            low, high = min(low, PUBLISHED_RATIOS[0]), max(high, PUBLISHED_RATIOS[1])
        times = (bound_s, estimate_s * own.median, estimate_s * low, estimate_s * high)
        runs = f"{own.n} run{'s' * (own.n > 1)} here"
        return cls(*times, f"compiler's verdict, calibrated by {runs} on {chip}")


@dataclass(frozen=True)
class Rental:
    """Devices that are paid for together, and the price of one."""

    device: str
    devices: int
    usd_per_hour: float | None  # None if unknown
    term: str = ""
    region: str = ""


@dataclass(frozen=True)
class Bill:
    """Expected cost of a run: hours are those that are paid for."""

    basis: str  # origin of the time of a step
    rental: Rental
    bound_hours: float
    hours: float  # the estimate
    low_hours: float  # the estimate's range, preemptions included
    high_hours: float
    wall_hours: float  # the estimate with the waits for machines
    step_hours: float  # of `hours`, in steps that count
    evaluation_hours: float
    checkpoint_hours: float
    preemptions: float

    @property
    def device(self) -> str:
        return self.rental.device

    @property
    def devices(self) -> int:
        return self.rental.devices

    @property
    def usd_per_hour(self) -> float | None:
        """Price of one device."""
        return self.rental.usd_per_hour

    @property
    def usd(self) -> float | None:
        """Devices times hours times the price; None without a price."""
        return self.price(self.hours)

    @property
    def goodput(self) -> float:
        """Share of the paid time in steps that count, as `store.query.timeline` defines it."""
        return self.step_hours / self.hours if self.hours else 0.0

    @property
    def has_range(self) -> bool:
        """Whether the estimate may be off; False if it was measured and nothing is preempted."""
        return self.low_hours < self.high_hours

    def price(self, hours: float) -> float | None:
        """Return the cost of hours of all devices; None without a price."""
        price = self.usd_per_hour
        return None if price is None else self.devices * hours * price


def compute_bill(
    work: RunWork,
    step: StepTime,
    rental: Rental,
    interruptions: Interruptions = NEVER,
    feed_per_s: float | None = None,
) -> Bill | None:
    """Compute the bill; None if preemptions leave no chance to end.

    Only spot machines are preempted. A step takes no less than its examples from the host.

    Args:
      feed_per_s: examples a second that the hosts prepare; None if unknown or no bound.
    """
    if rental.term != SPOT:
        interruptions = Interruptions(resume_s=interruptions.resume_s)
    input_s = work.batch / feed_per_s if feed_per_s else 0.0
    steps = work.steps + work.evaluations * work.eval_batches * work.eval_share
    held_s = work.checkpoints * work.held_s

    def run(step_s: float) -> Simulation | None:
        whole_s = steps * max(step_s, input_s) + held_s
        return simulate(whole_s, whole_s / max(1, work.checkpoints), interruptions)

    times = (step.bound_s, step.estimate_s, step.low_s, step.high_s)
    bound, estimate, low, high = map(run, times)
    if bound is None or estimate is None or low is None or high is None:
        return None
    step_s = max(step.estimate_s, input_s)
    return Bill(
        step.basis,
        rental,
        bound_hours=bound.mean.paid_s / _HOUR_S,
        hours=estimate.mean.paid_s / _HOUR_S,
        low_hours=low.low_s / _HOUR_S,
        high_hours=high.high_s / _HOUR_S,
        wall_hours=estimate.mean.wall_s / _HOUR_S,
        step_hours=work.steps * step_s / _HOUR_S,
        evaluation_hours=(steps - work.steps) * step_s / _HOUR_S,
        checkpoint_hours=held_s / _HOUR_S,
        preemptions=estimate.mean.preemptions,
    )


def format_usd(bill: Bill) -> str:
    """Format the money of a bill with its range; empty without a price."""
    usd, low, high = map(bill.price, (bill.hours, bill.low_hours, bill.high_hours))
    if usd is None:
        return ""
    return f"USD {usd:,.2f}" + (f" ({low:,.2f} to {high:,.2f})" if bill.has_range else "")


def bill_by_runs(
    values: JsonObject,
    records: Sequence[RunRecord],
    steps: int | None,
    prices: Sequence[DevicePrice],
) -> Bill | None:
    """Compute the bill from the newest complete run of the same step; None without such a run.

    Args:
      values: the new run's configuration.
      records: the most recently started first.
      steps: of the new run; None if equal to those of the old one.
    """
    wanted = (hash_step(values), values["data"]["global_batch_size"])
    for record in records:
        done = record.facts.final_up_to_step or 0
        mine = (hash_step(record.config), record.config.get("data.global_batch_size"))
        if not record.is_complete or not done or mine != wanted:
            continue
        hardware = read_hardware(record.facts, record.attempts[-1] if record.attempts else {})
        devices = count_devices(hardware)
        hours = compute_cost(record, prices).device_hours
        if hours:
            # All of its time, so evaluations and checkpoints are in it.
            step_s = hours / devices * _HOUR_S / done
            taken = StepTime.exact(step_s, f"as {record.path} took, step by step")
            return compute_bill(RunWork(steps or done), taken, _rent(hardware, devices, prices))
    return None


def bill_by_estimate(
    report: JsonObject,
    steps: int | None,
    devices: int,
    prices: Sequence[DevicePrice],
    calibrations: Mapping[str, Calibration],
) -> Bill | None:
    """Compute the bill from the compiler's estimate of a step; None if it has none.

    Args:
      calibrations: as `StepTime.by_compiler` takes them.
    """
    if not report.get("step_ms") or steps is None:
        return None
    time_s = StepTime.by_compiler(report, calibrations)
    step = replace(time_s, basis=f"{time_s.basis}: without input, evaluations and checkpoints")
    generation = str(report.get("target", "")).partition(":")[0]
    hardware = {"hardware": report["device"], "generation": generation}
    return compute_bill(RunWork(steps), step, _rent(hardware, devices, prices))


def _rent(hardware: JsonObject, devices: int, prices: Sequence[DevicePrice]) -> Rental:
    """Return the devices of a run at one's own price, else at the list price on demand."""
    name = str(hardware.get("hardware") or hardware.get("device") or "unknown")
    own = find_price(hardware, time.time(), prices)
    if own is not None:
        return Rental(name, devices, own.usd_per_device_hour)
    chip = str(hardware.get("generation") or hardware.get("chip") or "").removeprefix("TPU ")
    listed: list[ChipPrice] = find_chip_prices(chip, (), time.time())
    if chip not in GENERATIONS or not listed:
        return Rental(name, devices, None)
    # The compiler counts cores, a run the devices that it sees.
    row, by_compiler = GENERATIONS[chip], "generation" in hardware
    per_chip = row.devices_per_chip if by_compiler else row.seen_per_chip
    return Rental(name, devices, listed[0].usd / per_chip, listed[0].term, listed[0].region)
