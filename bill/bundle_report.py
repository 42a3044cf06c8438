"""A compiled step's bundles by role, module and operation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from bill.analysis import get_role
from bill.bundles.chip import describe_model, get_chip_model
from bill.bundles.counting import OperationCost, ProgramCost, count_program
from bill.schema import BundleReport, BundleRow
from utils.runtime.xla.scopes import read_origin

if TYPE_CHECKING:
    from bill.bundles.counting import ListingCosts
    from bill.hlo import Instruction
    from utils.generations import Generation

_PARTS = ("issued", "empty", "matrix", "waited")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def count_step(
    instructions: list[Instruction], costs: ListingCosts, generation: Generation
) -> ProgramCost:
    """Cycles of a step by its bundles."""
    return count_program(instructions, costs, get_chip_model(generation))


def create_bundle_report(program: ProgramCost, generation: Generation) -> BundleReport:
    """Create the report of a program's bundles."""
    operations = program.operations
    return BundleReport(
        issued_mcycles=_to_mcycles(program.issued),
        empty_mcycles=_to_mcycles(program.sum_of("empty")),
        matrix_mcycles=_to_mcycles(program.sum_of("matrix")),
        waited_mcycles=_to_mcycles(program.sum_of("waited")),
        with_dma_mcycles=_to_mcycles(program.with_dma),
        guessed_mcycles=_to_mcycles(program.guessed),
        unestimated_mcycles=_to_mcycles(
            sum(
                operation.trips * operation.cost.with_dma
                for operation in operations
                if operation.estimate is None and operation.cost
            )
        ),
        dma_bytes=round(program.sum_of("hbm_bytes")),
        async_bytes=program.async_bytes,
        sources=dict(Counter(operation.source for operation in operations)),
        unknown=round(program.sum_of("unknown")),
        model=describe_model(generation),
        roles=_group(operations, lambda operation: get_role(operation.instruction)),
        modules=_group(operations, _name_module),
        operations=_group(operations, lambda operation: operation.instruction.name),
    )


def _name_module(one: OperationCost) -> str:
    """Owner and path, one name for all blocks of a kind."""
    origin = read_origin(one.instruction.op_name)
    words = (origin.role, _NUMBER.sub("*", origin.path))
    return " ".join(word for word in words if word) or "other"


def _group(
    operations: Iterable[OperationCost], name: Callable[[OperationCost], str]
) -> list[BundleRow]:
    """Sums by a name, the dearest first."""
    groups: dict[str, list[OperationCost]] = {}
    for operation in operations:
        groups.setdefault(name(operation), []).append(operation)
    rows = [_sum_up(label, group) for label, group in groups.items()]
    return sorted(rows, key=lambda row: -(row.issued_mcycles + row.waited_mcycles))


def _sum_up(label: str, group: list[OperationCost]) -> BundleRow:
    sums = Counter[str]()
    for operation in group:
        if operation.cost is None:
            sums["issued"] += operation.trips * (operation.estimate or 0)
            continue
        for part in (*_PARTS, "hbm_bytes"):
            sums[part] += operation.trips * getattr(operation.cost, part)
    estimate = sum(operation.trips * (operation.estimate or 0) for operation in group)
    return BundleRow(
        name=label,
        runs=sum(operation.trips for operation in group),
        estimated_mcycles=_to_mcycles(estimate),
        dma_bytes=round(sums["hbm_bytes"]),
        source=group[0].source if len(group) == 1 else "",
        **{f"{part}_mcycles": _to_mcycles(sums[part]) for part in _PARTS},
    )


def _to_mcycles(cycles: float) -> float:
    return round(cycles / 1e6, 4)
