"""Facts of a chip that counting cycles needs, and the model of its memory.

The model of HBM: a transfer's first byte comes after a fixed latency; from then on all transfers
under way share nine tenths of the public bandwidth evenly. Refresh, banks, short strides and the
other core of a chip are not in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from utils.generations import Generation

# Share of the public bandwidth, and nanoseconds until a transfer's first byte: assumed.
_SHARE, _LATENCY_NS = 0.9, 340.0
# Bundles that are still issued behind a branch, bytes of a transfer's unit, matrix units of a core,
# cores of a device. Seen in listings; `tests/bill/test_bundles.py` holds them to products of
# known size. On v2 and v3 a transfer's size stands in memory, where it is not looked for.
_FACTS = {
    "v2": (1, 1024, 1, 1),
    "v3": (1, 1024, 2, 1),
    "v4": (1, 512, 4, 1),
    "v5e": (4, 32, 4, 1),
    "v5p": (4, 32, 4, 2),
    "v6e": (4, 32, 2, 1),
    "tpu7x": (4, 32, 2, 1),
}


@dataclass(frozen=True)
class ChipModel:
    """One core: the whole device but on v5p, where two share an operation and its memory."""

    delay_slots: int  # bundles that are still issued behind a branch
    granule_bytes: int  # unit of a transfer's size
    units: int  # matrix units; `rows_per_cycle` is what each of them takes
    rows_per_cycle: float
    bytes_per_cycle: float  # of HBM
    latency_cycles: float  # until a transfer's first byte


def get_chip_model(generation: Generation) -> ChipModel:
    """Return the model of a generation's core."""
    delay, granule, units, cores = _FACTS[generation.name]
    flops = generation.peak_tflops * 1e3 / generation.clock_ghz
    # FLOPs of a row in all units of all cores: the peak divided by it is rows a cycle and unit.
    of_row = 2 * cores * units * generation.unit_width**2
    return ChipModel(
        delay_slots=delay,
        granule_bytes=granule,
        units=units,
        rows_per_cycle=round(flops / of_row),
        bytes_per_cycle=_SHARE * generation.hbm_gb_per_s / generation.clock_ghz / cores,
        latency_cycles=_LATENCY_NS * generation.clock_ghz,
    )


def describe_model(generation: Generation) -> str:
    """Describe the model in a sentence."""
    return (
        f"a DMA's first byte comes after {_LATENCY_NS:.0f} ns, then those under way share "
        f"{_SHARE:.0%} of the public {generation.hbm_gb_per_s:.0f} GB/s evenly; copies beside "
        "operations wait nowhere; collectives are not in it"
    )


@dataclass
class Transfer:
    """A DMA under way."""

    begins: float  # cycle of its first byte
    left: float  # bytes still to move
    granules: int
    done: float | None = None  # cycle of its end; None if not known yet


@dataclass
class HbmTraffic:
    """HBM as it is shared by the transfers under way."""

    model: ChipModel
    now: float = 0.0
    live: list[Transfer] = field(default_factory=list)

    def issue(self, cycle: float, granules: int) -> Transfer:
        """Begin a transfer."""
        self._run(cycle)
        size = granules * self.model.granule_bytes
        transfer = Transfer(cycle + self.model.latency_cycles, float(size), granules)
        self.live.append(transfer)
        return transfer

    def finish(self, transfer: Transfer) -> float:
        """Return the cycle at which a transfer ends if no other is issued before."""
        while transfer.done is None:
            self._step(math.inf)
        return transfer.done

    def _run(self, cycle: float) -> None:
        while self.now < cycle:
            if not self.live:
                self.now = cycle
                return
            self._step(cycle)

    def _step(self, limit: float) -> None:
        """Advance to the next beginning or end of a transfer, or to the limit.

        Between these events the number of active transfers, and so each one's share, is constant.
        """
        now, until = self.now, limit
        active = [transfer for transfer in self.live if transfer.begins <= now]
        share = self.model.bytes_per_cycle / max(1, len(active))
        ends = [now + transfer.left / share for transfer in active]
        for later in ends:
            until = min(until, later)
        if len(active) < len(self.live):
            until = min(
                [until, *(transfer.begins for transfer in self.live if transfer.begins > now)]
            )
        for transfer, end in zip(active, ends, strict=True):
            transfer.left -= (until - now) * share
            # By the time as well: behind 1e8 cycles a time's last digit is more bytes than that.
            if transfer.left <= 1e-6 or end <= until:
                transfer.done = until
        self.now = until
        self.live = [transfer for transfer in self.live if transfer.done is None]
