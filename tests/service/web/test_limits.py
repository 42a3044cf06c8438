"""What a request may cost: time and memory of the largest ones, over a real connection."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import psutil
import pytest

from service.web.gate import BodyTooDeep, check_depth
from service.web.tokens import TokenBook
from tests.service.web.apps import make_store
from tests.support.waiting import PATIENCE_S, wait_for
from tests.tools.test_serve import start

MIB = 1 << 20
_TRIES = 10


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[tuple[str, int, TokenBook, psutil.Process]]:
    """A service that is a process of its own."""
    store = make_store(tmp_path_factory.mktemp("limits"))
    process, url = start(store)
    parts = urlsplit(url)
    try:
        tokens = TokenBook(store / "service" / "tokens.json")
        yield parts.hostname, parts.port, tokens, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)


@pytest.fixture
def live(running, request) -> tuple[str, int, str, psutil.Process]:
    """Its host, port and process, and a token: changes a minute are counted for each by itself."""
    host, port, tokens, process = running
    token = tokens.add(request.node.name[:64], "admin")
    ask(host, port, make_head(token, 2) + b"{}")
    return host, port, token, process


def make_head(token: str, length: int | None, *more: str) -> bytes:
    lines = [
        "POST /api/v1/submit HTTP/1.1",
        "Host: localhost",
        f"Authorization: Bearer {token}",
        "Content-Type: application/json",
        *more,
    ]
    lines += [] if length is None else [f"Content-Length: {length}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def ask(host: str, port: int, content: bytes) -> int:
    """Return the status of the first answer, 0 if the connection is closed without an answer."""
    with socket.create_connection((host, port), timeout=PATIENCE_S) as connection:
        threading.Thread(target=_send, args=(connection, content), daemon=True).start()
        answer = connection.recv(64)
        return int(answer.split()[1]) if answer else 0


def _send(connection: socket.socket, content: bytes) -> None:
    try:
        connection.sendall(content)
    except OSError:
        return  # the other side has had enough


@pytest.mark.slow
def test_invalid_requests_cost_little_time_and_memory(live):
    """1 GiB announced, sent in pieces, a million brackets, aliases: time of the processor."""
    host, port, token, process = live
    brackets = b'{"config":' + b"[" * 1_000_000
    flat = b"[" + b"[]," * 300_000 + b"[]]"
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    bomb = b'{"config": "configs/smoke.yaml", "overrides_yaml": "a: &a [x]\\nb: [*a, *a]"}'
    requests = {
        "announced": (make_head(token, 1 << 30) + b"x" * MIB, 413),
        "in pieces": (make_head(token, None, "Transfer-Encoding: chunked") + chunk * 200, 413),
        "brackets": (make_head(token, len(brackets)) + brackets, 422),
        "flat": (make_head(token, len(flat)) + flat, 422),
        "aliases": (make_head(token, len(bomb)) + bomb, 422),
        "headers": (make_head(token, 2, *(f"X-{i}: a" for i in range(100))) + b"{}", 431),
    }
    before = process.memory_info().rss
    for name, (content, status) in requests.items():
        used = sum(process.cpu_times()[:2])
        found = [ask(host, port, content) for _ in range(_TRIES)]
        each = (sum(process.cpu_times()[:2]) - used) / _TRIES
        assert set(found) == {status}, name
        print(f"{name}: {each * 1000:.0f} ms of the processor")
        # What is no attack but large is read before it is refused.
        assert each < (0.1 if name != "flat" else 1.0), name
    grown = (process.memory_info().rss - before) / MIB
    print(f"memory: +{grown:.1f} MiB")
    assert grown <= 50


@pytest.mark.slow
def test_an_endless_body_is_dropped_and_blocks_no_other(live):
    host, port, token, _ = live
    slow = [socket.create_connection((host, port), timeout=PATIENCE_S) for _ in range(20)]
    for connection in slow:
        connection.sendall(make_head(token, 100) + b"{")
    assert ask(host, port, make_head(token, 2) + b"{}") == 422
    # The whole request was answered while the slow ones still waited.
    assert select.select(slow, [], [], 0)[0] == []
    assert all(connection.recv(64).startswith(b"HTTP/1.1 408") for connection in slow)
    for connection in slow:
        connection.close()


@pytest.mark.slow
def test_streams_beyond_the_limit_are_refused_and_closed_ones_are_freed(live):
    host, port, token, _ = live
    head = (
        f"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n"
    )
    streams = []
    for _ in range(64):
        stream = socket.create_connection((host, port), timeout=PATIENCE_S)
        stream.sendall(head.encode())
        assert stream.recv(64).startswith(b"HTTP/1.1 200")
        streams.append(stream)
    assert ask(host, port, head.encode()) == 503
    assert ask(host, port, head.replace("/events", "/runs").encode()) == 200
    for stream in streams:
        stream.close()
    wait_for(lambda: ask(host, port, head.encode()) != 503)


def test_a_text_of_brackets_is_refused_at_the_depth_limit():
    for text in (b"[" * 10_000_000, b'"' + b"[" * 40, b'{"a":' * 33):
        with pytest.raises(BodyTooDeep):
            check_depth(text, 32)
    check_depth(b"[" * 32 + b"]" * 32, 32)
    check_depth(b'{"a": "\\\\", "b": "' + b"[{" * 50 + b'"}', 32)
