"""`StopRequest`: signals and maintenance notices that ask a run to end after the current step."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from utils.log import get_logger

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_VENDOR_FILE = Path("/sys/class/dmi/id/product_name")
_HOST_VARIABLE = "GCE_METADATA_HOST"  # as Google's own libraries name it
_DEFAULT_HOST = "metadata.google.internal"
# Path below the instance -> answers that mean no harm. A migrated machine goes on where it was.
_NOTICES = {
    "maintenance-event": ("NONE", "", "MIGRATE_ON_HOST_MAINTENANCE"),
    "preempted": ("FALSE", ""),
}
_PROBE_S, _WAIT_S, _RETRY_S = 2.0, 300.0, 10.0


class StopRequest:
    """Whether the loop should end after its step, and why.

    The first SIGTERM or SIGINT asks; the second one ends the process at once, which leaves the
    last whole checkpoint as it is.

    Attributes:
      reason: what asked; empty while nothing has.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._signals = 0

    def ask(self, reason: str) -> None:
        """Ask the loop to end; the first reason stays."""
        self.reason = self.reason or reason

    @contextlib.contextmanager
    def listen(self) -> Iterator[None]:
        """While the block runs, signals and maintenance notices ask; main thread only."""
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
            # No logger here: the signal may have come while it held its lock.
            os.write(sys.stderr.fileno(), f"{name} again: ending at once\n".encode())
            os._exit(128 + number)
        self.ask(name)


def watch_maintenance(ask: Callable[[str], None]) -> threading.Event:
    """Watch the cloud machine's metadata for maintenance and preemption notices.

    A thread for each notice waits in a request that the server answers when something changes.
    Off Google's machines there is no server and no thread.

    Returns:
      An event that ends the watching.
    """
    done = threading.Event()
    host = os.environ.get(_HOST_VARIABLE) or (_DEFAULT_HOST if _is_on_google() else "")
    if host:
        for notice in _NOTICES:
            threading.Thread(
                target=_watch, args=(host, notice, ask, done), name=f"watch {notice}", daemon=True
            ).start()
    return done


def _watch(host: str, notice: str, ask: Callable[[str], None], done: threading.Event) -> None:
    """React to what changes: a notice that stands at the start may stand for an hour.

    It has ended an attempt of this run already, or will be followed by a signal; to end for it
    again would save and start anew after every step.
    """
    answer = _read_notice(host, notice, "")
    if answer is None:
        return
    standing, etag = answer
    if standing not in _NOTICES[notice]:
        get_logger().warning(
            "the machine has announced %s: %s since before the start: the run goes on from its "
            "checkpoints if it is taken away", notice, standing
        )  # fmt: skip
    while etag and not done.is_set():
        answer = _read_notice(host, notice, etag)
        if answer is None:
            done.wait(_RETRY_S)  # the server itself is away for a moment
            continue
        value, etag = answer
        if value != standing and value not in _NOTICES[notice]:
            get_logger().warning("the machine announces %s: %s", notice, value)
            ask(f"{notice} {value}")
            return
        standing = value


def _read_notice(host: str, notice: str, etag: str) -> tuple[str, str] | None:
    """The notice's value, once it differs from that of `etag`, and its tag; none: no answer.

    Without a tag the server cannot tell a change from the same answer.
    """
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


def _is_on_google() -> bool:
    try:
        return "Google" in _VENDOR_FILE.read_text(encoding="utf-8")
    except OSError:
        return False
