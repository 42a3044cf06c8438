"""What stops a run: signals, once and twice, and the machine's own notices."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.support.child_runs import ROOT
from utils.stopping import StopRequest, watch_maintenance


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_requests_a_stop_and_handlers_are_restored(number):
    before = signal.getsignal(number)
    stop = StopRequest()
    with stop.listen():
        assert stop.reason == ""
        os.kill(os.getpid(), number)
        signal.sigtimedwait([], 0)  # let the handler run
        assert stop.reason == signal.Signals(number).name
    assert signal.getsignal(number) is before


_WAIT = """
import os, sys
sys.path.insert(0, os.getcwd())
from utils.stopping import StopRequest
stop = StopRequest()
with stop.listen():
    print("ready", flush=True)
    while True:
        line = sys.stdin.readline()
        print("reason", stop.reason, flush=True)
"""


def test_a_second_signal_ends_the_process_at_once():
    process = subprocess.Popen(
        [sys.executable, "-c", _WAIT],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    reason = ""
    while not reason:
        process.stdin.write("\n")
        process.stdin.flush()
        reason = process.stdout.readline().removeprefix("reason").strip()
    assert reason == "SIGTERM"
    process.send_signal(signal.SIGINT)
    assert process.wait() == 128 + signal.SIGINT
    assert process.stderr.read() == "SIGINT again: ending at once\n"


class Metadata(BaseHTTPRequestHandler):
    """The metadata server of a cloud machine, with settable values."""

    answers: queue.Queue
    asked: list
    standing: str  # value at the start, of maintenance-event

    def do_GET(self) -> None:
        if self.headers.get("Metadata-Flavor") != "Google":
            self.send_error(403)
            return
        self.asked.append(self.path)
        value = self.standing if self.path.endswith("maintenance-event") else "FALSE"
        if "wait_for_change" in self.path:
            if "/preempted" in self.path:
                threading.Event().wait()  # it never changes
            value = self.answers.get()
        if not value:
            self.send_error(503)
            return
        self.send_response(200)
        self.send_header("ETag", f"tag{len(self.asked)}")
        self.end_headers()
        self.wfile.write(value.encode())

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def metadata(monkeypatch):
    """A metadata server on this machine."""
    Metadata.answers, Metadata.asked, Metadata.standing = queue.Queue(), [], "NONE"
    monkeypatch.setattr("utils.stopping._RETRY_S", 0.0)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
    yield Metadata
    server.shutdown()
    server.server_close()


TERMINATE, MIGRATE = "TERMINATE_ON_HOST_MAINTENANCE", "MIGRATE_ON_HOST_MAINTENANCE"


@pytest.mark.parametrize(
    ("standing", "answers"),
    [
        ("NONE", [TERMINATE]),
        # The server is away for a moment; the same answer again after its longest wait.
        ("NONE", ["NONE", "", TERMINATE]),
        # A machine that is moved while it runs goes on.
        ("NONE", [MIGRATE, "NONE", TERMINATE]),
        # One that stood there at the start has ended an attempt already.
        (TERMINATE, [TERMINATE, TERMINATE, "NONE", TERMINATE]),
    ],
)
def test_a_maintenance_notice_requests_a_stop(metadata, standing, answers, caplog):
    reasons: queue.Queue = queue.Queue()
    metadata.standing = standing
    done = watch_maintenance(reasons.put)
    for answer in answers:
        metadata.answers.put(answer)
    assert reasons.get(timeout=30) == f"maintenance-event {TERMINATE}"
    assert metadata.answers.empty()  # not before the last answer
    done.set()
    waiting = [path for path in metadata.asked if "wait_for_change=true" in path]
    assert all("last_etag=tag" in path for path in waiting)
    assert ("since before the start" in caplog.text) == (standing == TERMINATE)


def test_a_machine_without_a_metadata_server_is_not_watched(monkeypatch):
    """A closed port: each thread ends with its first request."""
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    before = set(threading.enumerate())
    watch_maintenance(lambda reason: pytest.fail(reason))
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=30)
        assert not thread.is_alive()


def test_outside_google_cloud_no_thread_is_started(monkeypatch, tmp_path):
    monkeypatch.delenv("GCE_METADATA_HOST", raising=False)
    monkeypatch.setattr("utils.stopping._VENDOR_FILE", tmp_path / "nowhere")
    before = threading.active_count()
    watch_maintenance(lambda reason: pytest.fail(reason))
    assert threading.active_count() == before


_STALL = """
import os, sys, threading
sys.path.insert(0, os.getcwd())
from utils.stopping import StallWatch
watch = StallWatch(0.3, lambda: "input", lambda reason: print("reported:", reason, flush=True))
list(watch.follow(range(3)))
def waits_for_ever():
    threading.Event().wait()
threading.Thread(target=waits_for_ever, daemon=True).start()
threading.Event().wait()
"""


def test_a_hanging_loop_is_ended_with_the_stacks_of_all_threads():
    done = subprocess.run([sys.executable, "-c", _STALL], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 70
    assert "waits_for_ever" in done.stderr
    assert "Current thread" in done.stderr or "Thread 0x" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("the run was stopped: no step ended for 0.3 s (train.stall_timeout_s)")
    assert "stands in 'input'" in last
    assert done.stdout.startswith("reported: no step ended")


_WORKS = """
import os, sys
sys.path.insert(0, os.getcwd())
from utils.stopping import StallWatch
watch = StallWatch(30.0, lambda: "", lambda reason: None)
watch.close()
off = StallWatch(0.0, lambda: "", lambda reason: None)
import threading
print([t.name for t in threading.enumerate() if t.name == "stall-watch" and not t.join()])
"""


def test_a_closed_watchdog_ends_and_none_starts_without_a_limit():
    done = subprocess.run([sys.executable, "-c", _WORKS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
