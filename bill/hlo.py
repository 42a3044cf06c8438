"""Reads a scheduled HLO module as the TPU compiler prints it: costs and memory spaces."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "f8e4m3fn": 1,
    "f8e5m2": 1,
    "bf16": 2,
    "f16": 2,
    "s16": 2,
    "u16": 2,
    "f32": 4,
    "s32": 4,
    "u32": 4,
    "f64": 8,
    "s64": 8,
    "u64": 8,
    "c64": 8,
}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
# Instructions that do nothing on the chip, or whose cost another instruction carries.
FREE = (
    "parameter",
    "constant",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "copy-done",
    "slice-done",
    "async-done",
    "after-all",
    "partition-id",
    "replica-id",
    "domain",
    "opt-barrier",
    "iota",
)

_HEAD = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_NAME = re.compile(r'op_name="([^"]*)"')
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_TILE = re.compile(r"([\d,]+):T\(([\d,]+)\)")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"\b(?:calls|body|to_apply|branch_computations)=\{?%?([\w.\-]+)")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_CONDITION_LIMIT = re.compile(r"constant\((\d+)\)")


@dataclass(frozen=True)
class Array:
    """One array of a result: element type, sizes, whether it lies in HBM.

    Args:
      tiled: sizes as they are stored, rounded up to the tiles of the layout; empty: as they are.
    """

    dtype: str
    sizes: tuple[int, ...]
    in_hbm: bool
    tiled: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def bytes(self) -> int:
        """Bytes without padding."""
        return self.elements * BYTES.get(self.dtype, 4)

    @property
    def padded_bytes(self) -> int:
        """Bytes with the padding of tiles."""
        return math.prod(self.tiled or self.sizes) * BYTES.get(self.dtype, 4)


@dataclass
class Instruction:
    """One line of a computation.

    Args:
      cycles: the compiler's estimate for one execution, or None.
      trips: how often it runs in a step.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    text: str
    op_name: str = ""
    cycles: int | None = None
    trips: int = 1
    called: tuple[str, ...] = field(default=())

    @property
    def total_cycles(self) -> int:
        """Cycles in a step."""
        return (self.cycles or 0) * self.trips


def read_module(text: str) -> dict[str, list[Instruction]]:
    """Instructions of each computation by its name; the entry computation is `ENTRY`."""
    computations: dict[str, list[Instruction]] = {}
    current: list[Instruction] | None = None
    for line in text.splitlines():
        if current is None:
            match = re.match(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$", line)
            if match and not line.startswith("HloModule"):
                current = computations.setdefault("ENTRY" if match[1] else match[2], [])
        elif line.startswith("}"):
            current = None
        else:
            instruction = _read_instruction(line)
            if instruction is not None:
                current.append(instruction)
    return computations


def list_instructions(computations: dict[str, list[Instruction]]) -> list[Instruction]:
    """List the instructions that the chip runs one after the other, bodies of loops included.

    A loop's instructions carry its trip count; those of a fusion are part of the fusion.
    """
    return list(_walk(computations, "ENTRY", 1))


def _walk(
    computations: dict[str, list[Instruction]], name: str, trips: int
) -> Iterator[Instruction]:
    for instruction in computations.get(name, ()):
        if instruction.opcode in ("while", "call", "conditional"):
            count = _count_trips(computations, instruction) if instruction.opcode == "while" else 1
            for called in instruction.called:
                yield from _walk(computations, called, trips * count)
        else:
            instruction.trips = trips
            yield instruction


def _count_trips(computations: dict[str, list[Instruction]], loop: Instruction) -> int:
    """Known trip count of a loop; else the limit that its condition compares with; else 1."""
    known = _TRIPS.search(loop.text)
    if known:
        return int(known[1])
    condition = re.search(r"condition=%?([\w.\-]+)", loop.text)
    body = computations.get(condition[1], []) if condition else []
    limits = [int(m[1]) for instruction in body if (m := _CONDITION_LIMIT.search(instruction.text))]
    return max(limits, default=1)


def read_arrays(text: str) -> tuple[Array, ...]:
    """Parse the arrays of a result type such as `(f32[8]{0:T(128)S(1)}, u8[])`."""
    arrays = []
    for dtype, sizes, layout in _SHAPE.findall(text):
        space = _SPACE.search(layout)
        numbers = tuple(int(size) for size in sizes.split(",") if size)
        in_hbm = space is None or space[1] == "0"
        arrays.append(Array(dtype, numbers, in_hbm, _round_to_tile(numbers, layout)))
    return tuple(arrays)


def _round_to_tile(sizes: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """Round the axes of an array up to its layout's first tile: `2,1,0:T(8,128)(2,1)`."""
    tile = _TILE.match(layout)
    if tile is None or not sizes:
        return sizes
    axes = [int(axis) for axis in tile[1].split(",")]  # the fastest first
    rounded = list(sizes)
    for axis, side in zip(axes, reversed(tile[2].split(",")), strict=False):
        rounded[axis] = -(-sizes[axis] // int(side)) * int(side)
    return tuple(rounded)


def _read_instruction(line: str) -> Instruction | None:
    head = _HEAD.match(line)
    if head is None:
        return None
    rest = line[head.end() :]
    length = _measure_type(rest)
    opcode = _OPCODE.match(rest, length)
    if opcode is None:
        return None
    end = _find_closing(rest, opcode.end() - 1)
    op_name, cycles = _NAME.search(rest), _CYCLES.search(rest)
    return Instruction(
        name=head[1],
        opcode=opcode[1],
        arrays=read_arrays(rest[:length]),
        operands=tuple(_OPERAND.findall(rest[opcode.end() : end])),
        text=rest,
        op_name=op_name[1] if op_name else "",
        cycles=int(cycles[1]) if cycles else None,
        called=tuple(_CALLED.findall(rest[end:])),
    )


def _measure_type(text: str) -> int:
    """Length of the result type that a text begins with."""
    if text.startswith("("):
        return _find_closing(text, 0) + 1
    space = text.find(" ")
    return space if space >= 0 else len(text)


def _find_closing(text: str, start: int) -> int:
    """Position of the parenthesis that closes the one at `start`."""
    depth = 0
    for position in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if depth == 0:
            return position
    return len(text) - 1


def count_dot_flops(text: str) -> float:
    """2 * outputs * contracted length, over all matrix products of a module's text."""
    total = 0.0
    for body in read_module(text).values():
        arrays = {instruction.name: instruction.arrays for instruction in body}
        for instruction in body:
            if instruction.opcode == "dot":
                left = arrays[instruction.operands[0]][0]
                axes = _CONTRACTED.findall(instruction.text)[0].split(",")
                length = math.prod(left.sizes[int(axis)] for axis in axes if axis)
                total += 2.0 * instruction.arrays[0].elements * length
    return total


def get_hbm_bytes(instructions: list[Instruction]) -> int:
    """Bytes that a step moves between the chip and its HBM, by the memory space of each array.

    Operands and results that lie in HBM, and the far side of asynchronous copies.
    """
    places = {instruction.name: instruction.arrays for instruction in instructions}
    total = 0
    for instruction in instructions:
        if instruction.opcode in FREE:
            continue
        if instruction.opcode.endswith("-start"):
            total += instruction.trips * _get_moved_bytes(instruction, places)
            continue
        arrays = list(instruction.arrays)
        for operand in dict.fromkeys(instruction.operands):
            arrays += places.get(operand, ())
        total += instruction.trips * sum(array.bytes for array in arrays if array.in_hbm)
    return total


def _get_moved_bytes(start: Instruction, places: dict[str, tuple[Array, ...]]) -> int:
    """Count the bytes of an asynchronous copy or slice: the smaller side, if one side is HBM."""
    arrays = [array for array in start.arrays if array.elements > 1]
    if len({array.in_hbm for array in arrays}) < 2:
        return 2 * min((a.bytes for a in arrays if a.in_hbm), default=0)
    return min(array.bytes for array in arrays)
