"""Counts what a layout costs a compiled step: copies, padding, float32 products, host operators."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from bill.analysis import COPIES, describe_owner
from bill.hlo import FREE, list_instructions, read_module
from bill.schema import LayoutCounter, LayoutCounters

if TYPE_CHECKING:
    from bill.hlo import Instruction

_PRODUCTS = ("dot", "convolution")
_SPACE = re.compile(r"S\(\d+\)")


def count_layout(hlo: str, host_ops: list[str]) -> LayoutCounters:
    """Count the layout's costs in a scheduled program.

    Args:
      host_ops: operators without a lowering, which run on the host.
    """
    computations = read_module(hlo)
    instructions = list_instructions(computations)
    layouts = {item.name: _get_layout(item) for body in computations.values() for item in body}
    copies = [item for item in instructions if _changes_layout(item, layouts)]
    types = {
        item.name: {array.dtype for array in item.arrays}
        for body in computations.values()
        for item in body
    }
    products = [
        item
        for item in instructions
        for product in _list_products(item, computations)
        if any("f32" in types.get(name, ()) for name in product.operands)
    ]
    arrays = [
        (array, item)
        for item in instructions
        if item.opcode not in FREE
        for array in item.arrays
        if array.in_hbm
    ]
    whole = sum(array.padded_bytes for array, _ in arrays) or 1
    padded = sum(array.padded_bytes - array.bytes for array, _ in arrays)
    # Of a module where there is one: copies between memories belong to none.
    worst = max(
        arrays,
        key=lambda pair: (bool(pair[1].op_name), pair[0].padded_bytes - pair[0].bytes),
        default=None,
    )
    is_padded = worst is not None and padded > 0
    return LayoutCounters(
        layout_copies=_count(copies, sum(item.trips for item in copies)),
        layout_mcycles=_count(copies, round(sum(i.total_cycles for i in copies) / 1e6, 4)),
        padded_share=LayoutCounter(
            value=round(padded / whole, 4), first=describe_owner(worst[1]) if is_padded else ""
        ),
        float32_products=_count(products, sum(item.trips for item in products)),
        host_ops=LayoutCounter(value=len(host_ops), first=", ".join(host_ops[:1])),
    )


def _get_layout(instruction: Instruction) -> str:
    """Return type, order and tiles of a result, without its memory."""
    return _SPACE.sub("", instruction.text.partition(" ")[0])


def _changes_layout(instruction: Instruction, layouts: Mapping[str, str]) -> bool:
    """Return whether it is a copy to another layout, rather than to another memory alone."""
    if instruction.opcode not in COPIES:
        return False
    source = layouts.get(instruction.operands[0], "")
    return instruction.opcode != "copy" or source != layouts[instruction.name]


def _count(instructions: list[Instruction], value: float) -> LayoutCounter:
    return LayoutCounter(value=value, first=describe_owner(instructions[0]) if instructions else "")


def _list_products(
    instruction: Instruction, computations: Mapping[str, list[Instruction]]
) -> Iterator[Instruction]:
    """Yield the products of an instruction: itself, or those in its fusion."""
    if instruction.opcode in _PRODUCTS:
        yield instruction
    for name in instruction.called if instruction.opcode == "fusion" else ():
        for item in computations.get(name, ()):
            yield from _list_products(item, computations)
