"""Ends of a run from outside its loop: signals, maintenance notices, and a loop that stalls."""

from __future__ import annotations

import contextlib
import faulthandler
import http.client
import os
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import TypeVar

from utils.log import get_logger

T = TypeVar("T")
# EX_SOFTWARE of sysexits.h: a fault of the program, restart it.
EXIT_STALLED = 70
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_VENDOR_FILE = Path("/sys/class/dmi/id/product_name")
# Path below the instance -> harmless values. A migrated machine continues.
_NOTICES = {
    "maintenance-event": ("NONE", "", "MIGRATE_ON_HOST_MAINTENANCE"),
    "preempted": ("FALSE", ""),
}
_PROBE_S, _WAIT_S, _RETRY_S = 2.0, 300.0, 10.0


class StopRequest:
    """Whether the loop should end after its step, and why.

    The first SIGTERM or SIGINT requests the end; the second ends the process at once, with the last
    whole checkpoint intact.
    """

    def __init__(self) -> None:
        self.reason = ""  # of the request; empty without one
        self._signals = 0

    def ask(self, reason: str) -> None:
        """Request the end of the loop; the first reason is kept."""
        self.reason = self.reason or reason

    @contextlib.contextmanager
    def listen(self) -> Iterator[None]:
        """Let signals and maintenance notices request the end; only in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        stop_watching = watch_maintenance(self.ask)
        try:
            yield
        finally:
            stop_watching.set()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        self._signals += 1
        name = signal.Signals(number).name
        if self._signals > 1:
            # Not by the logger: the signal may interrupt it while it holds its lock.
            os.write(sys.stderr.fileno(), f"{name} again: ending at once\n".encode())
            os._exit(128 + number)
        self.ask(name)


def watch_maintenance(ask: Callable[[str], None]) -> threading.Event:
    """Watch Google's metadata for notices in threads, until the returned event is set."""
    done = threading.Event()
    # As in Google's own libraries.
    host = os.environ.get("GCE_METADATA_HOST", "")
    with contextlib.suppress(OSError):
        if not host and "Google" in _VENDOR_FILE.read_text(encoding="utf-8"):
            host = "metadata.google.internal"
    if host:
        for notice in _NOTICES:
            threading.Thread(
                target=_watch, args=(host, notice, ask, done), name=f"watch {notice}", daemon=True
            ).start()
    return done


def _watch(host: str, notice: str, ask: Callable[[str], None], done: threading.Event) -> None:
    """Request the end when a notice changes; one that exists at the start may last an hour.

    It has already ended an attempt of this run, or a signal will follow; ending for it again would
    save and restart after every step.
    """
    answer = _read_notice(host, notice, "")
    if answer is None:
        return
    standing, etag = answer
    if standing not in _NOTICES[notice]:
        get_logger().warning(
            "the machine has announced %s: %s since before the start: the run goes on from its "
            "checkpoints if it is taken away",
            *(notice, standing),
        )
    while etag and not done.is_set():
        answer = _read_notice(host, notice, etag)
        if answer is None:
            done.wait(_RETRY_S)  # the server is briefly unavailable
            continue
        value, etag = answer
        if value != standing and value not in _NOTICES[notice]:
            get_logger().warning("the machine announces %s: %s", notice, value)
            ask(f"{notice} {value}")
            return
        standing = value


def _read_notice(host: str, notice: str, etag: str) -> tuple[str, str] | None:
    """Read a notice's value and tag, after it differs from `etag`; None without a response."""
    url = f"http://{host}/computeMetadata/v1/instance/{notice}"
    if etag:
        url += f"?wait_for_change=true&last_etag={etag}&timeout_sec={_WAIT_S:.0f}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_WAIT_S + 10 if etag else _PROBE_S) as response:
            value = response.read(200).decode(errors="replace").strip().upper()
            return value, response.headers.get("ETag", "")
    except (OSError, ValueError, http.client.HTTPException):
        return None


class StallWatch:
    """A thread that ends the process if the loop stalls, and prints where.

    It ends after `timeout_s` without a beat; 0: never. `get_span` returns the current span of the
    loop; `report` is called with the reason before the end and must not block for long.
    """

    def __init__(
        self, timeout_s: float, get_span: Callable[[], str], report: Callable[[str], None]
    ) -> None:
        self._timeout_s = timeout_s
        self._get_span, self._report = get_span, report
        self._last = time.monotonic()
        self._done = threading.Event()
        if timeout_s > 0:
            threading.Thread(target=self._watch, name="stall-watch", daemon=True).start()

    def beat(self) -> None:
        self._last = time.monotonic()

    def follow(self, items: Iterable[T]) -> Iterator[T]:
        for item in items:
            self.beat()
            yield item

    def close(self) -> None:
        self._done.set()

    def _watch(self) -> None:
        while True:
            left_s = self._last + self._timeout_s - time.monotonic()
            if left_s <= 0:
                break
            if self._done.wait(left_s):
                return
        reason = (
            f"no step ended for {self._timeout_s:g} s (train.stall_timeout_s); the loop stands in "
            f"{self._get_span() or 'no span'!r}"
        )
        sys.stderr.write(f"{reason}; stacks of all threads:\n")
        sys.stderr.flush()
        faulthandler.dump_traceback(all_threads=True)
        sys.stderr.write(f"the run was stopped: {reason}\n")
        sys.stderr.flush()
        # In a thread: the hanging code may hold a lock that the report needs.
        reporter = threading.Thread(target=self._report, args=(reason,), daemon=True)
        reporter.start()
        reporter.join(timeout=5.0)
        os._exit(EXIT_STALLED)
