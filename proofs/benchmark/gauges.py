"""What is read off a device while it is measured: time, compiled graphs, memory.

A new device has a subclass of `Gauge` and a row here, where the host's own figures do not do.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from utils.runtime.cuda import CudaRuntime
from utils.runtime.xla.runtime import XlaRuntime

if TYPE_CHECKING:
    from utils.runtime.base import Runtime


class HostClock:
    """Steps by the host's clock; the last one of a block ends when the device has finished."""

    def __init__(self) -> None:
        self._stamps: list[float] = []

    def __len__(self) -> int:
        return len(self._stamps)

    def start(self) -> None:
        self._stamps = [time.perf_counter()]

    def stamp(self) -> None:
        self._stamps.append(time.perf_counter())

    def take(self) -> list[float]:
        """Seconds of each step since the start."""
        self.stamp()
        return np.diff(self._stamps).tolist()


class _CudaClock(HostClock):
    """Steps by the GPU's own clock: the host runs many steps ahead of it."""

    _events: list[torch.cuda.Event]

    def __len__(self) -> int:
        return len(self._events)

    def start(self) -> None:
        self._events = []
        self.stamp()

    def stamp(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()  # into the stream, for which the host does not wait
        self._events.append(event)

    def take(self) -> list[float]:
        self.stamp()
        # The last event of the stream: the ones before it are complete then, too.
        self._events[-1].synchronize()
        pairs = itertools.pairwise(self._events)
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]


class Gauge:
    """The figures of a device that counts and remembers nothing."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def create_clock(self) -> HostClock:
        """Times the steps of a block."""
        return HostClock()

    def count_compiles(self) -> tuple[int, float]:
        """Graphs of this process so far and, where they are known, the seconds to compile them."""
        if not self._runtime.section.compile:
            return 0, 0.0
        # torch.compile counts its graphs, but not the seconds.
        from torch._dynamo.utils import counters

        return counters["stats"]["unique_graphs"], 0.0

    def get_peak_gib(self) -> float | None:
        """Return the peak of device memory; None if the host's memory is the device's."""
        return self._runtime.instruments.get_peak_gib()


class _CudaGauge(Gauge):
    """A GPU has a clock of its own."""

    def create_clock(self) -> HostClock:
        return _CudaClock()


class _XlaGauge(Gauge):
    """XLA counts its graphs and times their compilation."""

    def count_compiles(self) -> tuple[int, float]:
        from torch_xla.debug import metrics

        metric = metrics.metric_data("CompileTime")  # count, nanoseconds, samples
        return self._runtime.counters()["graphs"], metric[1] / 1e9 if metric else 0.0


_GAUGES: dict[type[Runtime], type[Gauge]] = {CudaRuntime: _CudaGauge, XlaRuntime: _XlaGauge}


def create_gauge(runtime: Runtime) -> Gauge:
    """Create the gauge of a runtime's class, or of its nearest base class that has one."""
    gauges = (_GAUGES[kind] for kind in type(runtime).__mro__ if kind in _GAUGES)
    return next(gauges, Gauge)(runtime)
