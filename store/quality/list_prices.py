"""List prices of rented chips by generation and region, dated, with own prices on top."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field

from store.quality.costs import DevicePrice, find_price
from utils.errors import UserError, get_hint
from utils.storage.installation import ROOT

PRICE_LIST = ROOT / "prices" / "google_cloud_tpu.yaml"
ON_DEMAND, SPOT, COMMITMENT = TERMS = ("on_demand", "spot", "commitment_1y")
OWN = "own"  # of the user's own table, whatever the term


class Terms(BaseModel):
    """USD for a chip and hour in one region; None if no public price was found."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    on_demand: float | None = Field(None, gt=0)
    spot: float | None = Field(None, gt=0)
    commitment_1y: float | None = Field(None, gt=0)


class PriceList(BaseModel):
    """The file of list prices."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    read: datetime.date  # when its source was read
    source: str
    about: str
    missing: dict[str, str]  # what was not found, and why
    usd_per_chip_hour: dict[str, dict[str, Terms]]  # generation -> region -> prices

    def describe(self) -> str:
        """Describe origin and date in a line."""
        return f"list prices of {self.source}, read {self.read}"


@dataclass(frozen=True)
class ChipPrice:
    """USD of one chip and hour, and the term and region that it is of; "" for own prices."""

    usd: float
    term: str
    region: str = ""


@functools.cache
def read_price_list(path: Path = PRICE_LIST) -> PriceList:
    """Read the list that this project ships."""
    return PriceList.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))


def find_chip_prices(
    generation: str, own: Sequence[DevicePrice], when: float, region: str = ""
) -> list[ChipPrice]:
    """Find the prices of a chip, one a term; without a region the cheapest region of each.

    A price of one's own (`store.quality.costs.read_prices`) for the chip replaces all of them. It
    is that of a device, which a chip has one of in a run (`TPU v5e`).

    Args:
      when: seconds since 1970 that own prices must be valid at.
    """
    mine = find_price({"chip": f"TPU {generation}"}, when, own)
    if mine is not None:
        return [ChipPrice(mine.usd_per_device_hour, OWN)]
    regions = read_price_list().usd_per_chip_hour.get(generation, {})
    prices = []
    for term in TERMS:
        known = [
            (usd, place)
            for place, terms in regions.items()
            if region in ("", place) and (usd := getattr(terms, term)) is not None
        ]
        if known:
            usd, place = min(known)
            prices.append(ChipPrice(usd, term, place))
    return prices


def list_missing(generation: str, prices: Sequence[ChipPrice]) -> list[str]:
    """List the terms without a price."""
    known = {price.term for price in prices}
    return [] if OWN in known else [f"{generation} {term}" for term in TERMS if term not in known]


def check_region(region: str) -> None:
    """Raise a UserError for a region that the list does not name."""
    regions = {place for rows in read_price_list().usd_per_chip_hour.values() for place in rows}
    if region and region not in regions:
        hint = get_hint(region, sorted(regions))
        raise UserError(
            f"--region ({region}) is not in the list of prices; {hint}, or give --prices"
        )
