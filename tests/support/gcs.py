"""A Google Cloud Storage server on loopback: gcp-storage-emulator and its missing parts.

The emulator knows no generation preconditions; they are added here as the service documents them
(412 where the object's generation is another), and so are uploads of no bytes.
`python -m tests.support.gcs PORT` serves until its standard input closes, with an empty bucket
named `bucket`.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from typing import Any

import pytest

from tests.support.child_runs import ROOT

BUCKET = "bucket"
_LOCK = threading.Lock()


def serve(port: int) -> None:
    """Serve until standard input closes."""
    from gcp_storage_emulator import server

    server.server.HTTPServer = ThreadingHTTPServer  # two clients must not wait for each other
    for _, handlers in server.HANDLERS:
        for method, handler in handlers.items():
            handlers[method] = _guard(handler)
    running = server.create_server("127.0.0.1", port, in_memory=True, default_bucket=BUCKET)
    running.start()
    sys.stdin.read()
    running.stop()


def _guard(handler: Callable[..., Any]) -> Callable[..., Any]:
    """One request at a time, refused where its precondition does not hold."""

    def guarded(request: Any, response: Any, storage: Any, *args: Any, **kwargs: Any) -> Any:
        with _LOCK:
            wanted = request.query.get("ifGenerationMatch") if request.method == "POST" else None
            if wanted and _get_generation(request, storage) != wanted[0]:
                response.status = HTTPStatus.PRECONDITION_FAILED
                response.json({"error": {"code": 412, "message": "conditionNotMet"}})
                return None
            if request.query.get("uploadType") == ["media"] and request.data is None:
                request._data = b""
            return handler(request, response, storage, *args, **kwargs)

    return guarded


def _get_generation(request: Any, storage: Any) -> str:
    """Of the object that an upload names, in its address or its first part; 0: there is none."""
    from gcp_storage_emulator.exceptions import NotFound

    name = request.query["name"][0] if "name" in request.query else request.data["meta"]["name"]
    try:
        return str(storage.get_file_obj(request.params["bucket_name"], name)["generation"])
    except NotFound:
        return "0"


@contextlib.contextmanager
def run_server() -> Iterator[dict[str, str]]:
    """A server in a process of its own; gives the environment that makes gs:// lead to it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.gcs", str(port)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_for(address, process)
        yield {"STORAGE_EMULATOR_HOST": address}
    finally:
        process.stdin.close()
        process.wait(timeout=30)


@contextlib.contextmanager
def use_server(environment: dict[str, str]) -> Iterator[None]:
    """Have gs:// lead to a server in this process and its children."""
    from gcsfs import GCSFileSystem

    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        GCSFileSystem.clear_instance_cache()  # an earlier client knows another server
        yield
    GCSFileSystem.clear_instance_cache()


def _wait_for(address: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            urllib.request.urlopen(f"{address}/storage/v1/b/{BUCKET}/o", timeout=5).close()
            return
        except OSError:
            if time.monotonic() > deadline or process.poll() is not None:
                raise
            time.sleep(0.05)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
