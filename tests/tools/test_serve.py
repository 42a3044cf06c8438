"""`python -m tools.serve` as a process: its address, its refusals, its end."""

from __future__ import annotations

import http.client
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from service.web import server
from tests.service.web.apps import make_store
from tools.serve import main

ROOT = Path(__file__).resolve().parents[2]


def start(store: Path, *flags: str) -> tuple[subprocess.Popen[str], str]:
    """The service and its start URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tools.serve", "--store", str(store), "--port", "0", *flags],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(store.parent / "cache")},
    )  # fmt: skip
    ready, _, _ = select.select([process.stdout], [], [], 60)
    line = process.stdout.readline() if ready else ""
    if "/start?token=" not in line:
        process.kill()
        raise AssertionError(line + process.communicate()[1])
    return process, line.split()[-1]


def get(url: str, **headers: str) -> http.client.HTTPResponse:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=30)
    connection.request("GET", f"{parts.path}?{parts.query}", headers=headers)
    return connection.getresponse()


def test_the_service_answers_under_its_start_url_and_ends_in_one_line(tmp_path):
    process, url = start(make_store(tmp_path))
    try:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/start\?token=[\w-]{43}", url)
        first = get(url)
        assert (first.status, first.headers["location"]) == (303, "/")
        cookie = first.headers["set-cookie"].partition(";")[0]
        runs = get(url.replace("/start", "/api/v1/runs"), Cookie=cookie)
        assert runs.status == 200 and b'"matched":3' in runs.read()
        assert get(url).status == 401
        assert "server" not in runs.headers
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == "stopped\n"


def run_main(*flags: str) -> int:
    try:
        return main(list(flags))
    except SystemExit as error:
        return int(error.code or 0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [(("--store", "nowhere"), "is no directory"),
     (("--host", "0.0.0.0"), "--allow-remote"),
     (("--host", "0.0.0.0", "--allow-remote"), "--token-file"),
     (("--port", "70000"), "another port"),
     (("--host", "203.0.113.1", "--allow-remote", "--token-file", "tokens.json"), "another"),
     (("--add-token", "a b"), "token's name"),
     (("--add-token", "a", "--role", "root"), "choose one of"),
     (("--port", "much"), "invalid int")],
)  # fmt: skip
def test_wrong_flags_are_one_line_and_code_2(tmp_path, capsys, monkeypatch, flags, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "runs").mkdir()
    assert run_main(*flags) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ") and errors.count("\n") == 1
    assert words in errors


def test_a_port_that_is_taken_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert run_main("--store", str(make_store(tmp_path)), "--port", port) == 2
    assert "cannot be listened on" in capsys.readouterr().err


def test_a_token_with_a_name_is_told_once(tmp_path, capsys):
    store = make_store(tmp_path)
    assert run_main("--store", str(store), "--add-token", "monitor") == 0
    output = capsys.readouterr().out
    token = output.splitlines()[0].split()[-1]
    assert output.startswith("monitor (view): ")
    assert token not in (store / "service" / "tokens.json").read_text()


def test_a_client_that_never_ends_its_headers_is_let_go(tmp_path, monkeypatch):
    """Its own patience is 10 s; here it is shorter."""
    process, url = start_impatient(make_store(tmp_path))
    try:
        parts = urlsplit(url)
        with socket.create_connection((parts.hostname, parts.port), timeout=30) as slow:
            slow.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ")
            began = time.monotonic()
            assert slow.recv(1024) == b""
            assert time.monotonic() - began < 20
        assert get(url).status == 303
    finally:
        process.kill()
        process.communicate()


def start_impatient(store: Path) -> tuple[subprocess.Popen[str], str]:
    """The same with 0.5 s for headers."""
    assert server._HEADERS_S > 0.5
    code = (
        "import sys\nfrom service.web import server\nserver._HEADERS_S = 0.5\n"
        "from tools.serve import main\nsys.exit(main(sys.argv[1:]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "--store", str(store), "--port", "0"], cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(store.parent / "cache")},
    )  # fmt: skip
    return process, process.stdout.readline().split()[-1]
