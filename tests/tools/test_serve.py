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
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from service.client import ServiceClient, ServiceRefusal
from service.jobs.state import ENDS
from service.web import server
from service.web.tokens import TokenBook
from store.record.artifacts import publish_artifacts
from tests.service.web.apps import make_store
from tools.serve import check_reachable, main
from utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def start(store: Path, *flags: str) -> tuple[subprocess.Popen[str], str]:
    """The service and its start URL."""
    command = [sys.executable, "-m", "tools.serve", "--store", str(store), "--port", "0"]
    process = subprocess.Popen(
        [*command, *(flags or ["--no-queue"])],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(store.parent / "cache")},
    )
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


def test_the_service_responds_streams_and_ends_with_one_line(tmp_path):
    """One process for all of it: to start one costs seconds."""
    store = make_store(tmp_path)
    publish_artifacts(store / "digits" / "seed1")
    token = TokenBook(store / "service" / "tokens.json").add("me", "admin")
    process, url = start(store)
    try:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/start\?token=[\w-]{43}", url)
        first = get(url)
        assert (first.status, first.headers["location"]) == (303, "/")
        assert get(url).status == 401
        cookie = first.headers["set-cookie"].partition(";")[0]
        runs = get(url.partition("/start")[0] + "/api/v1/runs", Cookie=cookie)
        assert runs.status == 200 and b'"matched":3' in runs.read()
        assert "server" not in runs.headers
        place = url.partition("/start")[0]
        client = ServiceClient(place, token)
        ask_everything(client, tmp_path)
        check_slow_clients(place)
        # A stream that is open does not hold the end.
        stream = client.watch()
        told = threading.Thread(target=list, args=(stream,))
        told.start()
        time.sleep(0.5)
        began = time.monotonic()
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert time.monotonic() - began < 3
    told.join(10)
    assert not told.is_alive()
    assert process.returncode == 130
    assert errors == "stopped\n"


def ask_everything(client: ServiceClient, folder: Path) -> None:
    """Each verb of the client once."""
    assert client.whoami() == {"who": "me", "role": "admin"}
    assert client.list_runs("eval.top1>60", limit=5)["matched"] == 1
    run = client.show_run("digits/seed1")
    assert run["values"]["eval.top1"] == 61.0
    assert "train.lr" in client.list_metrics("digits/seed1")
    series = client.read_series("digits/seed1", ["train.lr", "eval.top1"], start=1, width=50)
    assert [curve["metric"] for curve in series["curves"]] == ["train.lr", "eval.top1"]
    assert client.compare(["digits/seed0", "digits/seed1"])["metrics"]
    assert client.gate("digits/seed0", "digits/seed1", ["eval.top1:-:1:major"])["exit_code"] == 0
    assert client.list_trends() == {"trends": []}
    assert client.list_sweeps() == []
    assert client.list_jobs("queued")["matched"] == 0
    assert "configs/smoke.yaml" in client.list_configs()
    with pytest.raises(ServiceRefusal, match="no file of configs") as refused:
        client.submit("/etc/passwd", dry_run=True)
    assert refused.value.status == 422
    for ask in (client.show_job, client.read_log, client.stop, client.reopen, client.show_sweep):
        with pytest.raises(ServiceRefusal) as refused:
            ask("nothing")
        assert (refused.value.status, refused.value.code) == (404, "service.not_found")
    (artifact,) = [one for one in run["artifacts"] if one["path"] == "metrics.jsonl"]
    client.download("digits/seed1", artifact["id"], folder / "metrics.jsonl")
    assert (folder / "metrics.jsonl").stat().st_size == artifact["bytes"]
    with pytest.raises(ServiceRefusal) as refused:
        client.download("digits/seed1", "0" * 16, folder / "none")
    assert refused.value.status == 404 and not list(folder.glob("none*"))


def check_slow_clients(place: str) -> None:
    """Bodies that are said to be large are refused before they come."""
    parts = urlsplit(place)
    with socket.create_connection((parts.hostname, parts.port), timeout=30) as slow:
        slow.sendall(
            b"POST /api/v1/submit HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1073741824\r\n\r\n"
        )
        assert slow.recv(64).startswith(b"HTTP/1.1 401")
    assert get(f"{place}/static/nothing", Host="attacker.example").status == 421


def run_main(*flags: str) -> int:
    try:
        return main(list(flags))
    except SystemExit as error:
        return int(error.code or 0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--store", "nowhere"), "is no directory"),
        (("--store", "gs://"), "names no bucket"),
        (("--store", "s3://bucket/runs"), "cannot be opened"),
        (("--token-file", ".", "--add-token", "a"), "is no file"),
        (("--add-token", ""), "token name"),
        (("--role", "submit"), "--add-token NAME"),
        (("--root", "http://evil/"), "a directory or gs://BUCKET"),
        (("--root", "gs://"), "a directory or gs://BUCKET"),
        (("--root", ""), "a directory or gs://BUCKET"),
        (("--host", "0.0.0.0"), "--allow-remote"),
        (("--host", "0.0.0.0", "--allow-remote"), "--token-file"),
        (("--port", "70000"), "0-65535; give another port"),
        (("--host", "203.0.113.1", "--allow-remote", "--token-file", "tokens.json"), "another"),
        (("--add-token", "a b"), "token name"),
        (("--add-token", "a", "--role", "root"), "choose one of"),
        (("--port", "much"), "invalid int"),
    ],
)
def test_wrong_flags_give_one_line_and_code_2(tmp_path, capsys, monkeypatch, flags, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "runs").mkdir()
    assert run_main(*flags) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ") and errors.count("\n") == 1
    assert words in errors


def test_a_missing_bucket_is_refused_and_a_new_store_is_not(gs):
    check_reachable(f"{gs}/new")
    with pytest.raises(UserError, match="there is no such bucket"):
        check_reachable("gs://nobucket/runs")


def test_a_port_in_use_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert run_main("--store", str(make_store(tmp_path)), "--port", port) == 2
    assert "cannot listen on" in capsys.readouterr().err


def test_a_named_token_is_printed_once(tmp_path, capsys):
    store = make_store(tmp_path)
    assert run_main("--store", str(store), "--add-token", "monitor") == 0
    output = capsys.readouterr().out
    token = output.splitlines()[0].split()[-1]
    assert output.startswith("monitor (view): ")
    assert token not in (store / "service" / "tokens.json").read_text()


def test_a_client_with_endless_headers_is_dropped_and_sigterm_gives_143(tmp_path):
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
        process.terminate()
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (143, "")


def start_impatient(store: Path) -> tuple[subprocess.Popen[str], str]:
    """The same with 0.5 s for headers."""
    assert server._HEADERS_S > 0.5
    code = (
        "import sys\nfrom service.web import server\nserver._HEADERS_S = 0.5\n"
        "from tools.serve import main\nsys.exit(main(sys.argv[1:]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "--store", str(store), "--port", "0", "--no-queue"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(store.parent / "cache")},
    )
    return process, process.stdout.readline().split()[-1]


@pytest.mark.slow
def test_a_submitted_run_is_trained_and_outlives_the_service(tmp_path):
    """Submitted over HTTP, begun by the dispatcher; the service is killed, the next shows it."""
    store = tmp_path / "runs"
    store.mkdir()
    token = TokenBook(store / "service" / "tokens.json").add("me", "submit")
    process, url = start(store, "--slots", "1")
    client = ServiceClient(url.partition("/start")[0], token)
    try:
        overrides = {"runtime.device": "cpu", "runtime.num_threads": 1, "train.steps": 4}
        told = client.submit("configs/smoke.yaml", overrides, dry_run=True)
        assert told["job"] is None and told["lines"]
        job = client.submit("configs/smoke.yaml", overrides)["job"]
        events = client.watch()
        while client.show_job(job["id"])["state"] == "queued":
            next(events)
        events.close()
    finally:
        process.kill()
        process.communicate()
    # The dispatcher was not the service's to take along; the next service puts its own there.
    process, url = start(store, "--slots", "1")
    client = ServiceClient(url.partition("/start")[0], token)
    try:
        deadline = time.monotonic() + 240
        while client.show_job(job["id"])["state"] not in ENDS and time.monotonic() < deadline:
            time.sleep(0.5)
        done = client.show_job(job["id"])
        assert (done["state"], done["attempts"], done["exit_code"]) == ("complete", 1, 0), done
        run = client.show_run(job["run"])
        assert run["status"] == "complete" and run["artifacts"]
        assert "complete" in client.read_log(job["id"]) or client.read_log(job["id"])
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    *told, last = errors.splitlines()
    assert last == "stopped"
    assert len(told) == 1 and "of a service that is gone" in told[0], errors
    assert not list_dispatchers(store)


def list_dispatchers(store: Path) -> list[list[str]]:
    """The command lines of those that are at work on a store."""
    import psutil

    found = [one.info["cmdline"] or [] for one in psutil.process_iter(["cmdline"])]
    return [words for words in found if "tools.queue" in words and str(store) in words]
