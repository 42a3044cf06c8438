"""Reads a trace of torch.profiler: the time of its steps by module and phase.

Forward passes lie in ranges that `ModuleRanges` has opened. An operation of the backward pass has
the sequence number of the one that recorded it. On a GPU the time is that of the kernels, each of
the module that launched it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from utils.json_types import JsonObject
from utils.runtime.profiles.module_times import (
    BACKWARD,
    FORWARD,
    LOSS,
    OPTIMIZER,
    ModulePhase,
    ModuleSums,
    WorkSegment,
    cut,
    fill_phases,
    find_moment,
)
from utils.runtime.profiles.ranges import RANGE

_ON_HOST = ("cpu_op", "user_annotation")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_NODE = "autograd::engine::evaluate_function: "
_OUTSIDE = ModulePhase("", "")
_UNNAMED = (
    "the step runs as compiled programs, whose kernels carry no module: on cpu and cuda profile a "
    "run with --runtime.compile=false"
)


def read_trace(path: Path) -> JsonObject | None:
    """Read a trace; None if no step is in it."""
    groups: dict[str, list[JsonObject]] = defaultdict(list)
    for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"]:
        groups[event.get("cat") or ""].append(event)
    host = [event for kind in _ON_HOST for event in groups[kind]]
    steps = [event for event in groups["user_annotation"] if event["name"] == "step"]
    if not steps:
        return None
    main = steps[0]["tid"]
    reader = _HostReader()
    # The thread of the steps comes first: it records what other threads run backward.
    threads = sorted({event["tid"] for event in host}, key=lambda thread: thread != main)
    cuts = {thread: reader.cut([e for e in host if e["tid"] == thread]) for thread in threads}
    cuts[main] = [s for step in steps for s in fill_phases(_select(cuts[main], step))]
    sums = reader.sums
    for event in groups["cpu_instant_event"]:
        size = int(event.get("args", {}).get("Bytes", 0))
        origin = find_moment(cuts.get(event["tid"], ()), event["ts"])
        if size > 0 and origin is not None:
            sums.bytes[origin] += size
    launches = {
        event["args"]["correlation"]: find_moment(cuts.get(event["tid"], ()), event["ts"])
        for kind in _LAUNCHES
        for event in groups[kind]
        if "correlation" in event.get("args", {})
    }
    kernels = [
        (event["ts"], event["ts"] + event["dur"], origin)
        for kind in _ON_DEVICE
        for event in groups[kind]
        if (origin := launches.get(event["args"].get("correlation"))) is not None
    ]
    for began, ended, origin in sorted(kernels or cuts[main]):
        sums.us[origin] += ended - began
    if kernels:
        whole_us = max(kernel[1] for kernel in kernels) - min(kernels)[0]
        return sums.finish("device", len(steps), whole_us, _UNNAMED)
    return sums.finish("host", len(steps), sum(step["dur"] for step in steps), _UNNAMED)


def _select(segments: list[WorkSegment], step: JsonObject) -> list[WorkSegment]:
    began, ended = step["ts"], step["ts"] + step["dur"]
    return [segment for segment in segments if began <= segment.began < ended]


class _HostReader:
    """Finds the origin of the host's events."""

    def __init__(self) -> None:
        self.sums = ModuleSums()
        self._recorded: dict[int, str] = {}  # sequence number -> module
        self._last = ""  # module of the last backward operation

    def cut(self, events: list[JsonObject]) -> list[WorkSegment]:
        """Cut the events of one thread."""
        return cut(((e["ts"], e["ts"] + e["dur"], e) for e in events), self._find)

    def _find(self, event: JsonObject, outer: ModulePhase | None) -> ModulePhase | None:
        name, arguments = event["name"], event.get("args", {})
        if name.startswith(_NODE):
            # A sum into a parameter's gradient has no number: it follows its operation.
            number = arguments.get("Sequence number")
            self._last = self._last if number is None else self._recorded.get(number, "")
            return self._count(ModulePhase(BACKWARD, self._last))
        if outer is None:
            return _OUTSIDE if name == "step" else None
        if name.startswith(RANGE):
            module = name.removeprefix(RANGE)
            phase = LOSS if ":" in module and not module.startswith("student:") else FORWARD
            # Inside the backward pass a block computes its outputs again.
            return self._count(ModulePhase(BACKWARD if outer.phase == BACKWARD else phase, module))
        if name.startswith("Optimizer.step"):
            return self._count(ModulePhase(OPTIMIZER, ""))
        if "Sequence number" in arguments and outer.phase != BACKWARD:
            self._recorded[arguments["Sequence number"]] = outer.module
        return outer

    def _count(self, origin: ModulePhase) -> ModulePhase:
        self.sums.calls[origin] += 1
        return origin
