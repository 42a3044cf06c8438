"""`Instruments`: what a device tells of itself at work, and who hears of the loop's spans."""

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
    """Who is told of stretches of the loop; times are those of `time.perf_counter`."""

    def begin_span(self, name: str, now: float) -> None: ...

    def end_span(self, name: str, began: float, now: float) -> None: ...


class ReadDevice(Protocol):
    """What instruments ask of the device that they belong to."""

    device: torch.device


class Instruments:
    """All that can be read off a device and its loop beside results.

    Attributes:
      current_span: the stretch of the loop that runs now.
      watcher: is told of each of them; none: nobody wants to know.
    """

    current_span: str
    watcher: SpanWatcher | None

    def __init__(self, runtime: ReadDevice) -> None:
        self.current_span = ""
        self.watcher = None
        self._runtime = runtime

    @contextlib.contextmanager
    def note_span(self, name: str) -> Iterator[None]:
        """Around a stretch of the loop, as a watcher and a watchdog see it."""
        before, self.current_span = self.current_span, name
        watcher, began = self.watcher, time.perf_counter()
        if watcher is not None:
            watcher.begin_span(name, began)
        yield
        self.current_span = before
        if watcher is not None:
            watcher.end_span(name, began, time.perf_counter())

    def get_compile_s(self) -> float:
        """Seconds of compiling graphs since the start, where the compiler tells."""
        return 0.0

    def get_peak_gib(self) -> float | None:
        """Most memory that the device has held at a time; none where the host's is the device's."""
        return None

    def read_device(self) -> dict[str, float]:
        """`hbm_peak_gib` and `duty_cycle`, as far as the device tells; never waits for it.

        The share of time at work is what the device said when it was last asked, which is one call
        ago or longer: asking may take long, so a thread does.
        """
        found: dict[str, float] = {}
        peak = self.get_peak_gib()
        if peak is not None:
            found["hbm_peak_gib"] = peak
        duty = self._reading.take_duty()
        if duty is not None:
            found["duty_cycle"] = duty
        return found

    def _find_reader(self) -> ReadUse | None:
        """What asks this process's devices for their use; none: they do not tell."""
        return None

    @functools.cached_property
    def _reading(self) -> UseReading:
        return UseReading(self._find_reader())


class UseReading:
    """Asks devices for their use beside the loop: what hangs or fails there holds nobody up."""

    def __init__(self, read: ReadUse | None) -> None:
        self._read = read
        self._thread: threading.Thread | None = None
        self._found: list[float] = []

    def take_duty(self) -> float | None:
        """The share of time at work by the last answer, mean over devices; asks anew."""
        if self._read is None or (self._thread is not None and self._thread.is_alive()):
            return None
        found, self._found = self._found, []
        self._thread = threading.Thread(target=self._ask, name="device-use", daemon=True)
        self._thread.start()
        return sum(found) / len(found) / 100 if found else None

    def _ask(self) -> None:
        uses = self._read()
        self._found = [use.duty_percent for use in uses if use.duty_percent is not None]
