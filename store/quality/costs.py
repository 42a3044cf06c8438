"""Costs of runs: device-hours of their attempts, and money by a price table of the user."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from store.query.record import RunRecord
from store.query.timeline import compute_time, list_attempts
from store.record.attempts import count_devices, read_hardware
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.storage.places import is_remote, to_path

# The user's own prices, in a store.
PRICES_FILE = "prices.yaml"
_DEVICE_KEYS = ("chip", "hardware", "device")


class DevicePrice(BaseModel):
    """Price of a device (its chip, else hardware or name; `*` is any text) from a day on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: str = Field(min_length=1)
    since: datetime.date
    usd_per_device_hour: float = Field(ge=0, allow_inf_nan=False)


@dataclass(frozen=True)
class RunCost:
    """Cost of a run so far."""

    paid_s: float | None  # sum over attempts, from their beginning to their end; None if unknown
    device_hours: float | None  # the same times the devices of each
    usd: float | None  # None without a price table, or without a price for a device on that day
    is_least: bool  # an attempt was killed: it counts as far as its lines and spans go
    goodput: float | None  # share of the paid time in steps that still count (store.query.timeline)
    unpriced: tuple[str, ...]  # devices without a price


def read_prices(path: Path) -> list[DevicePrice]:
    """Read a YAML list of `device`, `since` and `usd_per_device_hour`."""
    try:
        rows = yaml.safe_load(path.read_text(encoding="utf-8"))
        return TypeAdapter(list[DevicePrice]).validate_python(rows)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"--prices {path} cannot be read: {reason}; give a YAML file") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise UserError(
            f"--prices {path}: {key or 'the file'}: {first['msg'].lower()}; write a list of "
            "{device, since, usd_per_device_hour}"
        ) from error


def read_store_prices(store: str) -> tuple[list[DevicePrice], str]:
    """Read the user's own prices beside the runs, and how to give some, or empty."""
    if is_remote(store):
        return [], f"own prices are read only from {PRICES_FILE} in a store on this machine"
    path = to_path(store) / PRICES_FILE
    return (read_prices(path), "") if path.is_file() else ([], f"for your own put {path} there")


def compute_cost(record: RunRecord, prices: Sequence[DevicePrice]) -> RunCost:
    """Compute the cost of a run so far from its attempts."""
    hours, usd = 0.0, 0.0
    unpriced = set()
    lines = {line.get("attempt"): line for line in record.attempts}
    for attempt in list_attempts(record):
        hardware = read_hardware(record.facts, lines.get(attempt.number, {}))
        spent = count_devices(hardware) * (attempt.ended - attempt.began) / 3600
        price = find_price(hardware, attempt.began, prices)
        if price is None:
            unpriced.add(_name_device(hardware))
        hours += spent
        usd += spent * (price.usd_per_device_hour if price else 0.0)
    time = compute_time(record)
    is_known = time.paid_s is not None
    return RunCost(
        time.paid_s,
        hours if is_known else None,
        usd if prices and is_known and not unpriced else None,
        time.is_least,
        time.goodput,
        tuple(sorted(unpriced)),
    )


@dataclass(frozen=True)
class CostRow:
    """Cost of runs together, and the gain of a metric over a base cost."""

    name: str  # of the run, or of the value that its runs share
    runs: int
    # paid_s, device_hours, usd, is_least: over the runs of known cost; None if there are none
    paid_s: float | None
    device_hours: float | None
    usd: float | None
    is_least: bool
    value: float | None  # the metric's mean; None if a run has no finite value
    unknown: int = 0  # number of runs without a known cost; the sums are then lower bounds
    # by how much `value` is better than the base's, in the metric's unit; None: no base
    gain: float | None = None
    # more_hours, more_usd: mean additional cost of one run over one run of the base
    more_hours: float | None = None
    more_usd: float | None = None

    @property
    def spent(self) -> float | None:
        """Mean cost of a run: money if all have a price, else hours. None if one is unknown."""
        if self.unknown or self.device_hours is None:
            return None
        return (self.device_hours if self.usd is None else self.usd) / self.runs

    @property
    def hours_per_point(self) -> float | None:
        """Device-hours for one unit of the metric; None if nothing was gained."""
        return self._divide_by_gain(self.more_hours)

    @property
    def usd_per_point(self) -> float | None:
        """Money for one unit of the metric; None if nothing was gained."""
        return self._divide_by_gain(self.more_usd)

    def _divide_by_gain(self, cost: float | None) -> float | None:
        return cost / self.gain if self.gain and self.gain > 0 and cost is not None else None


def sum_costs(name: str, costs: Sequence[RunCost], values: Sequence[float | None]) -> CostRow:
    """Sum the costs of runs, at least one, under a name."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    paid_s = [cost.paid_s for cost in costs if cost.paid_s is not None]
    hours = [cost.device_hours for cost in costs if cost.device_hours is not None]
    usd = [cost.usd for cost in costs if cost.usd is not None]
    return CostRow(
        name,
        len(costs),
        math.fsum(paid_s) if paid_s else None,
        math.fsum(hours) if hours else None,
        math.fsum(usd) if usd and len(usd) == len(paid_s) else None,
        any(cost.is_least for cost in costs),
        math.fsum(finite) / len(finite) if len(finite) == len(values) else None,
        len(costs) - len(paid_s),
    )


def hold_against(row: CostRow, base: CostRow, *, is_higher_better: bool) -> CostRow:
    """Return the row with its gain over a base, and the cost of that gain."""
    gain = more_hours = more_usd = None
    if row.value is not None and base.value is not None:
        gain = (row.value - base.value) * (1 if is_higher_better else -1)
    is_known = not (row.unknown or base.unknown)
    if is_known and row.usd is not None and base.usd is not None:
        more_usd = row.usd / row.runs - base.usd / base.runs
    if is_known and row.device_hours is not None and base.device_hours is not None:
        more_hours = row.device_hours / row.runs - base.device_hours / base.runs
    return replace(row, gain=gain, more_hours=more_hours, more_usd=more_usd)


def find_front(points: Sequence[tuple[float, float] | None], *, is_higher_better: bool) -> set[int]:
    """Return positions of the (cost, metric) pairs on the Pareto front; None takes no part."""
    sign = 1.0 if is_higher_better else -1.0
    known = [(cost, -sign * value, i) for i, p in enumerate(points) if p for cost, value in [p]]
    front, best = set(), float("inf")
    for _, value, position in sorted(known):
        if value < best:
            best = value
            front.add(position)
    return front


def find_price(
    hardware: JsonObject, began: float, prices: Sequence[DevicePrice]
) -> DevicePrice | None:
    """Find the newest price of the device that was valid on the day."""
    day = datetime.datetime.fromtimestamp(began, datetime.UTC).date()
    name = _name_device(hardware)
    known = [price for price in prices if fnmatchcase(name, price.device) and price.since <= day]
    return max(known, key=lambda price: price.since, default=None)


def _name_device(hardware: JsonObject) -> str:
    # PJRT calls every TPU `TPU`; the chip's name says which one, where it could be told.
    return str(next((hardware[key] for key in _DEVICE_KEYS if hardware.get(key)), "unknown"))
