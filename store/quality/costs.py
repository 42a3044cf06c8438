"""What runs have cost: device-hours of their attempts, and money by a table that the user gives."""

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

_HOUR_S = 3600.0


class DevicePrice(BaseModel):
    """What one device costs from a day on.

    Attributes:
      device: its kind, the `chip`, else `hardware`, else `device` of the run's environment; `*`
        stands for any text.
      usd_per_device_hour: as the user pays it; nothing is known here of anybody's prices.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: str = Field(min_length=1)
    since: datetime.date
    usd_per_device_hour: float = Field(ge=0, allow_inf_nan=False)


@dataclass(frozen=True)
class RunCost:
    """What a run has cost so far.

    Attributes:
      paid_s: sum over attempts, from their beginning to their end; none: nobody knows.
      device_hours: the same times the devices of each.
      usd: none: there is no table, or it has no price for a device on that day.
      is_least: an attempt was killed: it counts as far as its lines and spans go.
      goodput: share of the paid time in which steps were made that still count
        (store.query.timeline).
      unpriced: devices without a price.
    """

    paid_s: float | None
    device_hours: float | None
    usd: float | None
    is_least: bool
    goodput: float | None
    unpriced: tuple[str, ...]


def read_prices(path: Path) -> list[DevicePrice]:
    """The rows of a YAML file: a list of `device`, `since` and `usd_per_device_hour`.

    Raises:
      UserError: it cannot be read, or a row says something else.
    """
    try:
        rows = yaml.safe_load(path.read_text(encoding="utf-8"))
        return TypeAdapter(list[DevicePrice]).validate_python(rows)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"--prices {path} cannot be read: {reason}; give a YAML file") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UserError(
            f"--prices {path}: {place or 'the file'}: {first['msg'].lower()}; write a list of "
            "{device, since, usd_per_device_hour}"
        ) from error


def compute_cost(record: RunRecord, prices: Sequence[DevicePrice]) -> RunCost:
    """What a run has cost so far by its attempts."""
    hours, usd = 0.0, 0.0
    unpriced = []
    told = {one.get("attempt"): one for one in record.attempts}
    for attempt in list_attempts(record):
        hardware = read_hardware(record.facts, told.get(attempt.number, {}))
        spent = count_devices(hardware) * (attempt.ended - attempt.began) / _HOUR_S
        price = find_price(hardware, attempt.began, prices)
        if price is None:
            unpriced.append(_name_device(hardware))
        hours += spent
        usd += spent * (price.usd_per_device_hour if price else 0.0)
    time = compute_time(record)
    is_known = time.paid_s is not None
    return RunCost(
        time.paid_s, hours if is_known else None,
        usd if prices and is_known and not unpriced else None, time.is_least, time.goodput,
        tuple(sorted(set(unpriced))),
    )  # fmt: skip


@dataclass(frozen=True)
class CostRow:
    """Runs whose cost is told together, and what a metric gained beyond a base cost.

    Attributes:
      name: of the run, or of what its runs have in common.
      runs: how many.
      paid_s, device_hours, usd, is_least: over those of them whose cost is known; none: of none.
      unknown: how many have a cost that nobody knows: what is told of the others is the least.
      value: the metric's mean over them; none: one has none, or none that is finite.
      gain: by how much that is better than the base's, in the metric's unit; none: no base.
      more_hours, more_usd: what one run costs more than one of the base, in the mean.
    """

    name: str
    runs: int
    paid_s: float | None
    device_hours: float | None
    usd: float | None
    is_least: bool
    value: float | None
    unknown: int = 0
    gain: float | None = None
    more_hours: float | None = None
    more_usd: float | None = None

    @property
    def spent(self) -> float | None:
        """What one run costs in the mean: money where all have a price, else device-hours.

        None: of one of them nobody knows.
        """
        if self.unknown or self.device_hours is None:
            return None
        return (self.device_hours if self.usd is None else self.usd) / self.runs

    @property
    def hours_per_point(self) -> float | None:
        """Device-hours for one unit of the metric; none: nothing was gained."""
        is_known = self.gain and self.gain > 0 and self.more_hours is not None
        return self.more_hours / self.gain if is_known else None

    @property
    def usd_per_point(self) -> float | None:
        """Money for the same."""
        is_known = self.gain and self.gain > 0 and self.more_usd is not None
        return self.more_usd / self.gain if is_known else None


def sum_costs(name: str, costs: Sequence[RunCost], values: Sequence[float | None]) -> CostRow:
    """Runs whose cost is told together, at least one."""
    known = [one for one in values if one is not None and math.isfinite(one)]
    told = [one for one in costs if one.paid_s is not None]
    is_priced = all(one.usd is not None for one in told)
    return CostRow(
        name, len(costs), math.fsum(one.paid_s for one in told) if told else None,
        math.fsum(one.device_hours for one in told) if told else None,
        math.fsum(one.usd for one in told) if told and is_priced else None,
        any(one.is_least for one in costs),
        math.fsum(known) / len(known) if len(known) == len(values) else None,
        len(costs) - len(told),
    )  # fmt: skip


def hold_against(row: CostRow, base: CostRow, *, is_higher_better: bool) -> CostRow:
    """The row with what it gains over a base, and what that costs."""
    gain = more_hours = more_usd = None
    if row.value is not None and base.value is not None:
        gain = (row.value - base.value) * (1 if is_higher_better else -1)
    is_known = row.spent is not None and base.spent is not None
    if is_known and row.usd is not None and base.usd is not None:
        more_usd = row.usd / row.runs - base.usd / base.runs
    if is_known:
        more_hours = row.device_hours / row.runs - base.device_hours / base.runs
    return replace(row, gain=gain, more_hours=more_hours, more_usd=more_usd)


def find_front(points: Sequence[tuple[float, float] | None], *, is_higher_better: bool) -> set[int]:
    """Places of (cost, metric) that no other one beats in both; none: it takes no part."""
    sign = 1.0 if is_higher_better else -1.0
    known = [(cost, -sign * value, i) for i, p in enumerate(points) if p for cost, value in [p]]
    front, best = set(), float("inf")
    for _, value, place in sorted(known):
        if value < best:
            best = value
            front.add(place)
    return front


def find_price(
    hardware: JsonObject, began: float, prices: Sequence[DevicePrice]
) -> DevicePrice | None:
    """The newest price of the device that held on the day."""
    day = datetime.datetime.fromtimestamp(began, datetime.UTC).date()
    name = _name_device(hardware)
    known = [one for one in prices if fnmatchcase(name, one.device) and one.since <= day]
    return max(known, key=lambda one: one.since, default=None)


def _name_device(hardware: JsonObject) -> str:
    # PJRT calls every TPU `TPU`; the chip's name says which one, where it could be told.
    return str(
        hardware.get("chip") or hardware.get("hardware") or hardware.get("device") or "unknown"
    )
