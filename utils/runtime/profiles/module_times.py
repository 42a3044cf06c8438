"""The time of steps by module and phase, from nested events of a trace."""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from utils.json_types import JsonObject

FORWARD, BACKWARD, LOSS, OPTIMIZER = "forward", "backward", "loss", "optimizer"
T = TypeVar("T")


class ModulePhase(NamedTuple):
    """Where an operation comes from; `module` is empty outside of modules."""

    phase: str  # forward, backward, loss, optimizer; empty: not known yet
    module: str


class WorkSegment(NamedTuple):
    """A time in which one origin is at work, in microseconds."""

    began: float
    ended: float
    origin: ModulePhase


@dataclass
class ModuleSums:
    """Sums over steps by origin, in the order of their first entry."""

    us: dict[ModulePhase, float] = field(default_factory=lambda: defaultdict(float))
    calls: Counter[ModulePhase] = field(default_factory=Counter)
    bytes: Counter[ModulePhase] = field(default_factory=Counter)

    def finish(self, clock: str, steps: int, whole_us: float, unnamed: str) -> JsonObject:
        """Return means over steps, as `modules.json` has them.

        `clock` is host or device: whose operations are timed; `whole_us` of all steps by it;
        `unnamed` is the note if no module is named.
        """
        total_us = sum(self.us.values()) or 1.0
        modules = [
            {
                **origin._asdict(),
                "calls": self.calls[origin] / steps,
                "ms": us / steps / 1000,
                "share": us / total_us,
                "bytes": self.bytes[origin] / steps,
            }
            for origin, us in self.us.items()
        ]
        step_ms = whole_us / steps / 1000
        note = "" if any(origin.module for origin in self.us) else unnamed
        head = {"clock": clock, "steps": steps, "step_ms": step_ms}
        return {**head, "modules": modules, "note": note}


def cut(
    events: Iterable[tuple[float, float, T]],
    find_origin: Callable[[T, ModulePhase | None], ModulePhase | None],
) -> list[WorkSegment]:
    """Cut a thread's nested events, as (began, ended, event), into times of the innermost one.

    Args:
      find_origin: returns the origin of an event inside another one's; None: it is left out.
    """
    segments: list[WorkSegment] = []
    stack: list[tuple[float, ModulePhase | None]] = []
    now = 0.0

    def advance(until: float) -> None:
        nonlocal now
        while stack:
            ended, origin = stack[-1]
            end = min(ended, until)
            if end > now and origin is not None:
                segments.append(WorkSegment(now, end, origin))
            now = max(now, end)
            if ended > until:
                break
            stack.pop()
        now = until

    for began, ended, event in sorted(events, key=lambda item: (item[0], -item[1])):
        advance(began)
        stack.append((ended, find_origin(event, stack[-1][1] if stack else None)))
    advance(float("inf"))
    return segments


def fill_phases(segments: Sequence[WorkSegment]) -> list[WorkSegment]:
    """Name the phase of one step's segments outside of modules, by what is around them."""
    known = [index for index, segment in enumerate(segments) if segment.origin.phase]
    last = max((i for i in known if segments[i].origin.phase == BACKWARD), default=-1)
    filled: list[WorkSegment] = []
    for index, segment in enumerate(segments):
        position = bisect.bisect(known, index)
        around = [segments[i].origin for i in known[max(0, position - 1) : position + 1]]
        if segment.origin.phase:
            filled.append(segment)
        elif 0 <= last < index:
            filled.append(segment._replace(origin=ModulePhase(OPTIMIZER, "")))
        elif len(around) == 2 and all(origin.phase == BACKWARD for origin in around):
            # The engine of autograd between two operations.
            filled.append(segment._replace(origin=around[0]))
        else:
            filled.append(segment._replace(origin=ModulePhase(LOSS, "")))
    return filled


def find_moment(segments: Sequence[WorkSegment], time: float) -> ModulePhase | None:
    """Return what is at work at a time; None outside of all segments."""
    index = bisect.bisect(segments, time, key=lambda segment: segment.began) - 1
    if index < 0 or segments[index].ended < time:
        return None
    return segments[index].origin
