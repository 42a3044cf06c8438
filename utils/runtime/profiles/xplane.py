"""Reads a trace of XLA's profiler: the time of its steps by the scopes in the operations' names.

The trace holds a time for each instruction of a program, and the programs, whose instructions say
in which scope they were recorded (`utils.runtime.xla.scopes`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from utils.json_types import JsonObject
from utils.runtime.profiles.module_times import (
    BACKWARD,
    FORWARD,
    LOSS,
    OPTIMIZER,
    ModulePhase,
    ModuleSums,
    cut,
)
from utils.runtime.xla.scopes import read_origin

# The fields that are read, of OpenXLA's xplane.proto and hlo.proto: their numbers and types. Other
# fields are skipped; messages count as repeated, which reads the same bytes.
_MESSAGES = {
    "Space": "planes=1:Plane",
    "Plane": "name=2:string lines=3:Line events=4:EventEntry stats=5:StatEntry",
    "EventEntry": "value=2:EventName",
    "StatEntry": "value=2:StatName",
    "EventName": "id=1:int64 name=2:string stats=5:Stat",
    "StatName": "id=1:int64 name=2:string",
    "Line": "name=2:string began_ns=3:int64 events=4:Event",
    "Event": "id=1:int64 offset_ps=2:int64 duration_ps=3:int64 stats=4:Stat",
    "Stat": "id=1:int64 unsigned=3:uint64 signed=4:int64 text=5:string bytes=6:bytes "
    "reference=7:uint64",
    "Hlo": "module=1:Module",
    "Module": "name=1:string computations=3:Computation",
    "Computation": "instructions=2:Instruction",
    "Instruction": "name=1:string metadata=7:Metadata",
    "Metadata": "op_name=2:string",
}
_UNNAMED = (
    "XLA names operations only if profile.steps is set before it loads: start or resume the run "
    "with --profile.steps=FIRST-LAST and without runtime.compile; profiles on request then name "
    "them, too"
)
_DEVICE, _OPS = "/device:TPU", "XLA Ops"


def read_xplane(folder: Path) -> JsonObject | None:
    """Read the newest trace below a folder; None if it names no step or no operation."""
    paths = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    types = _create_types()
    space = types["Space"].FromString(paths[-1].read_bytes()) if paths else None
    planes = [_Plane(plane) for plane in (space.planes if space is not None else ())]
    steps = sum(name == "step" for plane in planes for name in plane.list_names())
    scopes = {key: scope for plane in planes for key, scope in plane.read_programs(types["Hlo"])}
    # Devices of a mesh do the same: one stands for all.
    devices = sorted((p for p in planes if p.name.startswith(_DEVICE)), key=lambda p: p.name)
    sums, moments = ModuleSums(), list[tuple[float, float]]()
    for plane in devices[:1] or planes:
        for line in plane.lines:
            events = list(plane.list_operations(line, scopes))
            for began, ended, (origin, size) in events:
                sums.calls[origin] += 1
                sums.bytes[origin] += size
                moments.append((began, ended))
            for segment in cut(events, lambda event, _: event[0]):
                sums.us[segment.origin] += segment.ended - segment.began
    if not steps or not moments:
        return None
    whole_us = max(ended for _, ended in moments) - min(moments)[0]
    return sums.finish("device", steps, whole_us, _UNNAMED)


class _Plane:
    """A plane of a trace: the host or a device, with the names of its events and their facts."""

    def __init__(self, plane: Any) -> None:
        self.name, self.lines = plane.name, plane.lines
        self._stats = {entry.value[0].id: entry.value[0].name for entry in plane.stats}
        self._events = {entry.value[0].id: entry.value[0] for entry in plane.events}

    def list_names(self) -> list[str]:
        """Return the names of all events on its lines."""
        return [self._events[event.id].name for line in self.lines for event in line.events]

    def read_programs(self, hlo: Any) -> Iterator[tuple[tuple[str, str], str]]:
        """Yield program and instruction, and the scope in which it was recorded."""
        stats = (stat.bytes for name in self._events.values() for stat in name.stats)
        modules = (module for data in stats if data for module in hlo.FromString(data).module)
        for module in modules:
            for item in (item for part in module.computations for item in part.instructions):
                scope = item.metadata[0].op_name if item.metadata else ""
                yield (module.name, item.name), scope

    def list_operations(
        self, line: Any, scopes: dict[tuple[str, str], str]
    ) -> Iterator[tuple[float, float, tuple[ModulePhase, int]]]:
        """Yield begin and end in microseconds, origin and bytes of a line's operations."""
        for event in line.events:
            name = self._events[event.id]
            facts = self._read(name.stats) | self._read(event.stats)
            if "hlo_op" not in facts and (line.name != _OPS or _DEVICE not in self.name):
                continue
            key = (str(facts.get("hlo_module", "")), str(facts.get("hlo_op", name.name)))
            scope = str(facts.get("tf_op") or scopes.get(key, ""))
            began = line.began_ns / 1000 + event.offset_ps / 1e6
            size = facts.get("bytes_accessed", 0)
            ended = began + event.duration_ps / 1e6
            yield began, ended, (_find_origin(scope), size if isinstance(size, int) else 0)

    def _read(self, stats: Any) -> dict[str, str | int]:
        facts: dict[str, str | int] = {}
        for stat in stats:
            text = stat.text or self._stats.get(stat.reference, "")
            facts[self._stats.get(stat.id, "")] = text or stat.unsigned or stat.signed
        return facts


def _find_origin(scope: str) -> ModulePhase:
    role, phase, path = read_origin(scope)
    if role in (OPTIMIZER, "gradients"):
        return ModulePhase(OPTIMIZER, "")
    if role == "student":
        return ModulePhase(BACKWARD if phase == BACKWARD else FORWARD, path or "student:")
    return ModulePhase(LOSS, f"{role}:{path}" if path else "")


def _create_types() -> dict[str, Any]:
    """Create the message types of `_MESSAGES`."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="step_profile.proto", package="step_profile")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in fields.split():
            head, _, kind = field.partition(":")
            label, _, number = head.partition("=")
            entry = message.field.add(name=label, number=int(number))
            entry.label = entry.LABEL_REPEATED if kind in _MESSAGES else entry.LABEL_OPTIONAL
            if kind in _MESSAGES:
                entry.type, entry.type_name = entry.TYPE_MESSAGE, f".step_profile.{kind}"
            else:
                entry.type = getattr(entry, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"step_profile.{name}"))
        for name in _MESSAGES
    }
