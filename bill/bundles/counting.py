"""Cycles of single operations and of whole programs by their bundles."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bill.bundles.chip import ChipModel
from bill.bundles.listing import Bundle, list_listings, read_listing
from bill.bundles.machine import EndlessProgramError, ScalarCore
from bill.hlo import COLLECTIVES, FREE, Array, Instruction

# Costs of listings by the names of their operations; None if the listing does not end.
ListingCosts = dict[str, "BundleCost | None"]

# What operations of equal code share: opcode, results and estimate.
_Code = tuple[str, tuple[Array, ...], int | None]

# Calls that name memory and do nothing.
_NAMING = ("AllocateBuffer", "ConcatBitcast")

_UNIT = re.compile(r"\.mxu(\d)")
# Rows of the left side in one instruction: a register of 8 x 128 words, two of bfloat16 a word.
_ROWS, _ROWS_BF16 = 8, 16


@dataclass(frozen=True)
class BundleCost:
    """Cost of one execution of an operation."""

    issued: int  # bundles, one a cycle
    empty: int  # of these without an instruction, which wait for a unit's latency
    matrix: float  # cycles in which the busiest matrix unit takes rows
    waited: float  # cycles behind transfers, by the model of `bill.bundles.chip`
    hbm_bytes: int  # moved by the operation itself
    unknown: int = 0  # decisions that depend on data, which the count guesses

    @property
    def with_dma(self) -> float:
        """Cycles with the waits for transfers."""
        return self.issued + self.waited


@dataclass(frozen=True)
class OperationCost:
    """An operation of a program."""

    instruction: Instruction
    trips: int  # how often it runs
    estimate: int | None  # the compiler's own, of one execution
    source: str  # `own` listing, that of a `twin` (libtpu writes equal code once), or `estimate`
    cost: BundleCost | None  # of one execution; None without a listing


@dataclass
class ProgramCost:
    """A program's cycles on one device."""

    model: ChipModel
    # Those with a listing or an estimate, in the order of the program
    operations: list[OperationCost] = field(default_factory=list)
    async_bytes: int = 0  # of copies between HBM and the chip that run beside operations
    # Operations that have neither listing nor estimate, by their opcode
    unseen: list[str] = field(default_factory=list)

    def sum_of(self, name: str) -> float:
        """Sum a field of `BundleCost` over the whole program."""
        return sum(
            operation.trips * float(getattr(operation.cost, name))
            for operation in self.operations
            if operation.cost
        )

    @property
    def estimate(self) -> int:
        """The compiler's estimate of all that has one."""
        return sum(operation.trips * (operation.estimate or 0) for operation in self.operations)

    @property
    def issued(self) -> float:
        """Bundles; for an operation without a listing its estimate."""
        return self.sum_of("issued") + self.guessed

    @property
    def guessed(self) -> int:
        """Estimates that stand in for listings that are not there."""
        return sum(
            operation.trips * (operation.estimate or 0)
            for operation in self.operations
            if not operation.cost
        )

    @property
    def hbm_bytes(self) -> float:
        """Moved by operations and beside them."""
        return self.sum_of("hbm_bytes") + self.async_bytes

    @property
    def with_dma(self) -> float:
        """Cycles with waits; at least what all bytes take at the model's bandwidth."""
        # Copies beside operations wait nowhere in the model, so their bytes count here alone.
        waits = self.issued + self.sum_of("waited")
        return max(waits, self.hbm_bytes / self.model.bytes_per_cycle)


def count_bundles(bundles: Sequence[Bundle], model: ChipModel) -> BundleCost:
    """Count the cycles of one execution of a listing."""
    execution = ScalarCore(bundles, model).run()
    pairs = list(zip(execution.counts, bundles, strict=True))
    busy = [0.0] * model.units
    for count, bundle in pairs:
        for kind, times in bundle.kinds.items():
            unit = _UNIT.search(kind) if kind.startswith("vmatmul") else None
            if unit:
                # An instruction feeds a register of rows, of which the unit takes some a cycle.
                busy[int(unit[1])] += count * times * _count_rows(kind) / model.rows_per_cycle
    return BundleCost(
        issued=sum(execution.counts),
        empty=sum(count for count, bundle in pairs if not bundle.kinds),
        matrix=max(busy),
        waited=execution.waited,
        hbm_bytes=execution.hbm_bytes,
        unknown=execution.unknown,
    )


def count_listings(folder: Path, model: ChipModel) -> ListingCosts:
    """Cost of each listing of a folder by its operation's name; None if it does not end."""
    costs: ListingCosts = {}
    for name, path in list_listings(folder).items():
        text = path.read_text(encoding="utf-8", errors="replace")
        try:
            costs[name] = count_bundles(read_listing(text), model)
        except EndlessProgramError:
            costs[name] = None
    return costs


def count_program(
    instructions: Sequence[Instruction], costs: ListingCosts, model: ChipModel
) -> ProgramCost:
    """Count the cycles of a compiled program.

    Args:
      instructions: of `list_instructions`, with the number of their runs.
      costs: of the listings that were written while it was compiled.
    """
    # libtpu writes one listing for operations of equal code: shapes and estimate identify them.
    twins: dict[_Code, str] = {}
    for instruction in instructions:
        if instruction.name in costs:
            twins.setdefault(_describe(instruction), instruction.name)
    program = ProgramCost(model)
    for instruction in instructions:
        name = (
            instruction.name if instruction.name in costs else twins.get(_describe(instruction), "")
        )
        cost = costs.get(name)
        source = "estimate" if cost is None else "own" if name == instruction.name else "twin"
        if cost or instruction.cycles is not None:
            program.operations.append(
                OperationCost(instruction, instruction.trips, instruction.cycles, source, cost)
            )
        elif is_copy_beside(instruction):
            program.async_bytes += instruction.trips * _count_async_bytes(instruction)
        elif _does_something(instruction):
            program.unseen.append(instruction.opcode)
    return program


def is_copy_beside(instruction: Instruction) -> bool:
    """Return whether an operation begins an asynchronous copy, of which bytes alone count."""
    kind = instruction.opcode.removesuffix("-start")
    return kind != instruction.opcode and kind not in COLLECTIVES


def _does_something(instruction: Instruction) -> bool:
    is_array = any(array.elements > 1 for array in instruction.arrays)
    return (
        is_array
        and instruction.opcode not in FREE
        and not any(name in instruction.text for name in _NAMING)
    )


def _describe(instruction: Instruction) -> _Code:
    return instruction.opcode, instruction.arrays, instruction.cycles


def _count_rows(kind: str) -> int:
    return _ROWS_BF16 if ".bf16" in kind and ".lmr" not in kind else _ROWS


def _count_async_bytes(start: Instruction) -> int:
    """Count the bytes of an asynchronous copy: the smaller array, scalars left out."""
    arrays = [array for array in start.arrays if array.elements > 1]
    if not any(array.in_hbm for array in arrays):
        return 0
    return min(array.bytes for array in arrays)
