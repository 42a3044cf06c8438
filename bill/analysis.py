"""Numbers of a compiled step: costs by role and module, memory, faults."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from bill.hlo import COLLECTIVES, FREE, Instruction, get_hbm_bytes, list_instructions, read_module
from bill.schema import Buffer, Collective, Cost, Fault, Group, Interval, Memory, Uncosted
from utils.runtime.xla.scopes import read_origin

if TYPE_CHECKING:
    from bill.compiled import Compiled
    from bill.step.tracing import StepExport
    from bill.targets import Target

_TOP = 20
_BUFFERS = 12
_LARGE = 2**20
COPIES = ("copy", "transpose")
# Custom calls that only rename memory.
_RENAMING = ("ConcatBitcast", "X64Split", "X64Combine", "Sharding", "AssumeGatherIndicesInBound")
_ROLES = (
    ("attention", re.compile(r"(^|\.)(attn|attention|self_attn|qkv|attn_pool)(\.|$|_)")),
    ("MLP", re.compile(r"(^|\.)(mlp|fc1|fc2|ffn)(\.|$)")),
    ("norm", re.compile(r"(^|\.)(norm\w*|bn\d*|ln\w*)(\.|$)")),
    ("embedding", re.compile(r"(^|\.)(patch_embed|pos_drop|stem\w*|conv_stem)(\.|$)")),
    (
        "convolution",
        re.compile(r"(^|\.)(conv\w*|downsample|maxpool|act\d*|se|layer\d|s\d)(\.|$|\d)"),
    ),
    ("head", re.compile(r"(^|\.)(head\w*|fc|fc_norm|global_pool|classifier)(\.|$)")),
)


def read_instructions(compiled: Compiled) -> list[Instruction]:
    """List the instructions of a compiled program in order, loops unrolled by their counts."""
    return list_instructions(read_module(compiled.hlo))


def sum_mcycles(instructions: list[Instruction]) -> float:
    """Estimated cycles of a step in millions."""
    return sum(instruction.total_cycles for instruction in instructions) / 1e6


def get_memory(
    compiled: Compiled, export: StepExport, target: Target, instructions: list[Instruction]
) -> Memory:
    """HBM of a device; `peak` is arguments + outputs + temporaries - aliased."""
    if compiled.needed_bytes is not None:
        return Memory(usable_bytes=target.usable_bytes, peak_bytes=compiled.needed_bytes)
    values = {
        name: compiled.facts.get_bytes(name) for name in ("argument", "output", "temp", "alias")
    }
    return Memory(
        usable_bytes=target.usable_bytes,
        argument_bytes=values["argument"],
        output_bytes=values["output"],
        temp_bytes=values["temp"],
        alias_bytes=values["alias"],
        peak_bytes=values["argument"] + values["output"] + values["temp"] - values["alias"],
        largest=_list_buffers(export, instructions),
    )


def _list_buffers(export: StepExport, instructions: list[Instruction]) -> list[Buffer]:
    buffers: list[Buffer] = []
    makers = {instruction.name: instruction for instruction in instructions}
    for instruction in instructions:
        arrays = instruction.arrays
        if instruction.opcode == "copy-start":
            arrays, instruction = (
                arrays[:1],
                makers.get(instruction.operands[0], instruction),
            )  # where it goes to
            if any(array.in_hbm for array in instruction.arrays):
                continue  # back to the chip, or from one place of HBM to another
        if instruction.opcode == "parameter":
            number = int(re.findall(r"parameter\((\d+)\)", instruction.text)[0])
            name = export.arguments[number] if number < len(export.arguments) else instruction.name
        elif instruction.opcode in FREE or instruction.opcode.endswith("-start"):
            continue
        else:
            name = describe_owner(instruction)
        kind = "argument" if instruction.opcode == "parameter" else "temporary"
        buffers += [
            Buffer(name=name, kind=kind, dtype=a.dtype, shape=list(a.sizes), bytes=a.bytes)
            for a in arrays
            if a.in_hbm and a.bytes >= _LARGE
        ]
    return sorted(buffers, key=lambda one: -one.bytes)[:_BUFFERS]


def describe_owner(instruction: Instruction) -> str:
    """Owner, module and phase of an instruction."""
    origin = read_origin(instruction.op_name)
    words = [origin.role, origin.path, "(backward)" if origin.phase == "backward" else ""]
    return " ".join(word for word in words if word) or instruction.name


def get_bounds(
    flops: float, hbm_bytes: int, mcycles: tuple[float | None, float], target: Target, units: int
) -> tuple[Interval, Interval, Interval]:
    """Step time in ms, units per second and share of the peak, of one device.

    Args:
      mcycles: by bundles with waits for DMA (None if not counted), and by the estimate.
      units: images or tokens of a step.
    """
    device = target.generation
    lower = max(flops / (device.peak_tflops * 1e12), hbm_bytes / (device.hbm_gb_per_s * 1e9))
    (bundles, estimate), per_s = mcycles, device.clock_ghz * 1e3
    least = flops / (device.peak_tflops * 1e12)

    def convert(change: Callable[[float], float]) -> Interval:
        return Interval(
            lower=change(lower),
            bundles=None if bundles is None else change(bundles / per_s),
            estimate=change(estimate / per_s),
        )

    return (
        convert(lambda seconds: 1e3 * seconds),
        convert(lambda seconds: units / seconds),
        convert(lambda seconds: least / seconds),
    )


def list_top(instructions: list[Instruction]) -> list[Cost]:
    """List the most expensive instructions."""
    entries = []
    for instruction in sorted(instructions, key=lambda one: -one.total_cycles)[:_TOP]:
        origin = read_origin(instruction.op_name)
        largest = max(instruction.arrays, key=lambda a: a.bytes, default=None)
        shape = f"{largest.dtype}{list(largest.sizes)}" if largest else ""
        entries.append(
            Cost(
                module=origin.path,
                owner=origin.role,
                phase=origin.phase,
                operation=_get_operation(instruction),
                instruction=instruction.name,
                mcycles=round(instruction.total_cycles / 1e6, 4),
                result=shape,
            )
        )
    return entries


def list_groups(instructions: list[Instruction]) -> list[Group]:
    """Cycles by role; layout copies are a role of their own."""
    counted: Counter[str] = Counter()
    for instruction in instructions:
        counted[get_role(instruction)] += instruction.total_cycles
    total = sum(counted.values()) or 1
    return [
        Group(role=role, mcycles=round(cycles / 1e6, 4), share=round(cycles / total, 4))
        for role, cycles in counted.most_common()
        if cycles
    ]


def get_role(instruction: Instruction) -> str:
    """Classify an instruction by its purpose."""
    if instruction.opcode in COPIES:
        return "layout copies"
    origin = read_origin(instruction.op_name)
    if origin.role.startswith("teacher"):
        return "teacher"
    if origin.role != "student":
        return origin.role or "other"
    for role, pattern in _ROLES:
        if pattern.search(origin.path):
            return role
    return "other"


def list_collectives(instructions: list[Instruction]) -> list[Collective]:
    """Collectives by kind and type; bytes are those of the operands."""
    sums: dict[tuple[str, str], list[int]] = {}
    places = {instruction.name: instruction.arrays for instruction in instructions}
    for instruction in instructions:
        kind = instruction.opcode.removesuffix("-start")
        if kind not in COLLECTIVES:
            continue
        for array in (a for name in instruction.operands for a in places.get(name, ())):
            entry = sums.setdefault((kind, array.dtype), [0, 0])
            entry[0] += instruction.trips
            entry[1] += instruction.trips * array.bytes
    return [
        Collective(kind=kind, dtype=dtype, count=count, bytes=size)
        for (kind, dtype), (count, size) in sorted(sums.items())
    ]


def list_uncosted(
    instructions: list[Instruction], counted: Collection[str] = ()
) -> tuple[list[Uncosted], int]:
    """Instructions without an estimate by kind, and how many are single numbers.

    Args:
      counted: names of those whose bundles are known.
    """
    by_opcode: dict[str, list[Instruction]] = {}
    scalars = 0
    for instruction in instructions:
        renames = any(word in instruction.text for word in _RENAMING)
        if (
            instruction.cycles is not None
            or instruction.name in counted
            or instruction.opcode in FREE
            or instruction.opcode == "reshape"
            or renames
        ):
            continue
        if instruction.arrays and all(a.elements <= 1 for a in instruction.arrays):
            scalars += 1
            continue
        by_opcode.setdefault(instruction.opcode, []).append(instruction)
    places = [
        instruction
        for instruction in instructions
        if instruction.opcode in FREE or instruction.cycles is not None
    ]
    return [
        Uncosted(
            opcode=opcode,
            count=len(group),
            bytes=_measure(group, places),
            first=describe_owner(group[0]),
        )
        for opcode, group in sorted(by_opcode.items(), key=lambda pair: -len(pair[1]))
    ], scalars


def _measure(group: list[Instruction], others: list[Instruction]) -> int:
    """HBM bytes of a few instructions among all."""
    return get_hbm_bytes([*others, *group]) - get_hbm_bytes(others)


def find_faults(
    instructions: list[Instruction],
    export: StepExport,
    compiled: Compiled,
    batch: int,
    *,
    is_bf16: bool,
) -> list[Fault]:
    """Known faults of training steps on TPUs, each with its size."""
    faults = [*_find_copies(instructions), *_find_wide(instructions, batch, is_bf16=is_bf16)]
    large = export.undonated
    for kind, names, text in (
        ("undonated state", large, "tensors are replaced without giving their memory back"),
        ("gradients alive", export.gradients_alive, "gradients are held across the step"),
        ("host fallback", export.host_ops, "operators run on the host"),
    ):
        if names:
            faults.append(
                Fault(kind=kind, count=len(names), text=f"{text}: {', '.join(names[:4])}")
            )
    dynamic = len(re.findall(r"\[<=\d", compiled.hlo))
    if dynamic:
        text = "arrays have a size that depends on data"
        faults.append(Fault(kind="dynamic shapes", count=dynamic, text=text))
    return faults


def _find_copies(instructions: list[Instruction]) -> list[Fault]:
    groups: dict[str, list[Instruction]] = {"layout copies": [], "packed qkv copies": []}
    for instruction in instructions:
        is_large = any(a.bytes >= _LARGE for a in instruction.arrays)
        if instruction.opcode in (*COPIES, "slice") and is_large:
            path = read_origin(instruction.op_name).path
            is_packed = re.search(r"attn(\.(qkv|[qk]_norm))?$", path) and _is_packed(instruction)
            groups["packed qkv copies" if is_packed else "layout copies"].append(instruction)
        elif instruction.opcode == "fusion" and _is_packed(instruction):
            groups["packed qkv copies"].append(instruction)
    return [
        Fault(
            kind=kind,
            count=len(group),
            text=f"first at {describe_owner(group[0])}",
            mcycles=round(sum(copy.total_cycles for copy in group) / 1e6, 4),
        )
        for kind, group in groups.items()
        if group
    ]


def _is_packed(instruction: Instruction) -> bool:
    """Return whether an array holds q, k and v as one axis of three that is transposed."""
    shapes = [a.sizes for a in instruction.arrays if len(a.sizes) == 5 and a.bytes >= _LARGE]
    moved = re.search(r"permute|generic_slice|unbind|stack|select", instruction.op_name)
    return bool(moved) and any(3 in sizes or sizes[0] == 1 for sizes in shapes)


def _find_wide(instructions: list[Instruction], batch: int, *, is_bf16: bool) -> list[Fault]:
    """Float32 arrays of the size of activations, in HBM, where the run computes in bfloat16."""
    wide = [
        instruction
        for instruction in instructions
        if is_bf16
        and instruction.opcode not in FREE
        and any(
            a.dtype == "f32" and a.in_hbm and a.bytes >= _LARGE and a.sizes[:1] == (batch,)
            for a in instruction.arrays
        )
    ]
    if not wide:
        return []
    cycles = round(sum(instruction.total_cycles for instruction in wide) / 1e6, 4)
    text = f"results of activation size, first at {describe_owner(wide[0])}"
    return [Fault(kind="float32 activations", count=len(wide), text=text, mcycles=cycles)]


def _get_operation(instruction: Instruction) -> str:
    names = re.findall(r"(aten__\w+|xla__\w+)", instruction.op_name)
    return names[-1].replace("aten__", "").replace("xla__", "") if names else instruction.opcode
