"""Readings of a device and its loop beside results: `Instruments`."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from utils.device_use import DeviceUse

ReadUse = Callable[[], Sequence[DeviceUse]]


class SpanWatcher(Protocol):
    """Receiver of the loop's spans; times are those of `time.perf_counter`."""

    def begin_span(self, name: str, now: float) -> None: ...

    def end_span(self, name: str, began: float, now: float) -> None: ...


class ReadDevice(Protocol):
    """The part of a runtime that instruments need."""

    device: torch.device


class Instruments:
    """Readings of a device and its loop."""

    def __init__(self, runtime: ReadDevice) -> None:
        self.current_span = ""  # of the loop
        self.watcher: SpanWatcher | None = None
        self._runtime = runtime

    @contextlib.contextmanager
    def note_span(self, name: str) -> Iterator[None]:
        """Record a span of the loop for a watcher and a watchdog."""
        before, self.current_span = self.current_span, name
        watcher, began = self.watcher, time.perf_counter()
        if watcher is not None:
            watcher.begin_span(name, began)
        yield
        self.current_span = before
        if watcher is not None:
            watcher.end_span(name, began, time.perf_counter())

    def get_compile_s(self) -> float:
        """Return the seconds of graph compilation since the start, if the compiler counts them."""
        return 0.0

    def get_peak_gib(self) -> float | None:
        """Return the device's peak memory; None if it has no memory of its own."""
        return None

    def read_device(self) -> dict[str, float]:
        """Read `hbm_peak_gib` and `duty_cycle`, if the device has them, without waiting.

        The duty cycle is that of an earlier call, because a thread reads it, which may take long.
        """
        values = {"hbm_peak_gib": self.get_peak_gib(), "duty_cycle": self._reading.take_duty()}
        return {name: value for name, value in values.items() if value is not None}

    def _find_reader(self) -> ReadUse | None:
        """Return a function that reads the use of this process's devices, or None."""
        return None

    @functools.cached_property
    def _reading(self) -> UseReading:
        return UseReading(self._find_reader())


class UseReading:
    """Reads the use of devices in a thread, so that hangs and failures do not stop the loop."""

    def __init__(self, read: ReadUse | None) -> None:
        self._read = read
        self._thread: threading.Thread | None = None
        self._percents: list[float] = []

    def take_duty(self) -> float | None:
        """Return the last duty cycle, mean over devices, and start a new reading."""
        if self._read is None or (self._thread is not None and self._thread.is_alive()):
            return None
        percents = self._percents
        self._percents = []
        self._thread = threading.Thread(
            target=self._read_use, args=(self._read,), name="device-use", daemon=True
        )
        self._thread.start()
        return sum(percents) / len(percents) / 100 if percents else None

    def _read_use(self, read: ReadUse) -> None:
        uses = read()
        self._percents = [use.duty_percent for use in uses if use.duty_percent is not None]
