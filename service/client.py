"""`ServiceClient`: the verbs of the service for programs, with the standard library alone.

    client = ServiceClient("http://127.0.0.1:8080", token)
    job = client.submit("configs/digits_student.yaml", {"optim.lr": 0.002})["job"]
    for event in client.watch():
        ...

Answers are JSON as `/api/v1/openapi.json` describes it. A refusal is a `ServiceRefusal` with the
status and the one sentence that says why. The token never goes to another host: no redirect is
followed.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlencode, urlsplit

from utils.errors import UserError
from utils.json_types import JsonObject, JsonValue

_API = "/api/v1"
_TIMEOUT_S = 60.0
# Comments keep a stream open each 15 s.
_STREAM_TIMEOUT_S = 60.0
_CHUNK = 1 << 18
Query = Mapping[str, str | int | bool | Sequence[str] | None]


class ServiceRefusal(UserError):
    """The service has refused: `status` as in HTTP, 0 where it did not answer at all."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class ServiceEvent(NamedTuple):
    """What has changed: kind `run`, `job` or `runs`, and which one."""

    kind: str
    facts: JsonObject


class ServiceClient:
    """One service.

    Args:
      url: as http://127.0.0.1:8080, without a path.
      token: that `python -m tools.serve --add-token` has made.

    Raises:
      UserError: no such URL.
    """

    def __init__(self, url: str, token: str, timeout_s: float = _TIMEOUT_S) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            raise UserError(f"url ({url!r}) is no address; give one such as http://127.0.0.1:8080")
        if not token.isascii() or not token.isprintable() or not token:
            raise UserError("token: it is no token; make one by tools.serve --add-token")
        self._is_secure, self._place = parts.scheme == "https", parts.netloc
        self._headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        self._timeout_s = timeout_s

    def whoami(self) -> JsonObject:
        """Whose token this is, and its role."""
        return self._get("/whoami")

    def list_runs(self, filter: str = "", **query: str | int | bool) -> JsonObject:
        """Runs that fit a filter; `sort`, `reverse`, `show`, `offset`, `limit` as in the API."""
        return self._get("/runs", {"filter": filter, **query})

    def show_run(self, run: str) -> JsonObject:
        """All of `experiment/name` but its history."""
        return self._get(_name_run(run))

    def list_metrics(self, run: str) -> list[str]:
        """The numbers that a run has curves of."""
        return self._get(f"{_name_run(run)}/metrics")["keys"]

    def read_series(
        self, run: str, metrics: Sequence[str], *, start: float | None = None,
        end: float | None = None, width: int = 600, x: str = "step",
    ) -> JsonObject:  # fmt: skip
        """Curves of a part of the axis x (step, epoch, time), of at most 2 x width points each."""
        query = {"metric": metrics, "start": start, "end": end, "width": width, "x": x}
        return self._get(f"{_name_run(run)}/series", query)

    def download(self, run: str, artifact_id: str, target: Path) -> None:
        """Write a file that a run has left behind; nothing stands there if it was cut short."""
        place = f"{_API}{_name_run(run)}/artifacts/{quote(artifact_id, safe='')}"
        partial = target.with_name(target.name + ".part")
        with self._ask("GET", place, timeout_s=self._timeout_s) as answer:
            try:
                with partial.open("wb") as file:
                    while chunk := answer.read(_CHUNK):
                        file.write(chunk)
                partial.replace(target)
            except (OSError, http.client.HTTPException) as error:
                raise ServiceRefusal(0, f"{self._place} ended in the middle: {error}") from error
            finally:
                partial.unlink(missing_ok=True)

    def compare(self, sides: Sequence[str], metrics: str = "", exact: bool = False) -> JsonObject:
        """Sides against the first one: RUN, several with commas, or NAME:FILTER."""
        return self._get("/compare", {"run": sides, "metrics": metrics, "exact": exact})

    def gate(
        self, base: str, new: str, gates: Sequence[str], undecided: str = "",
        unfinished: bool = False,
    ) -> JsonObject:  # fmt: skip
        """Whether `new` is worse than `base` by more than gates allow."""
        return self._get("/gates", {"base": base, "new": new, "gate": gates,
                                    "undecided": undecided, "unfinished": unfinished})  # fmt: skip

    def list_trends(self) -> JsonObject:
        """Benchmark reports over time."""
        return self._get("/trends")

    def list_sweeps(self) -> list[str]:
        """Names of sweeps."""
        return self._get("/sweeps")["sweeps"]

    def show_sweep(self, name: str) -> JsonObject:
        """A sweep's trials and tables."""
        return self._get(f"/sweeps/{quote(name, safe='')}")

    def list_jobs(self, state: str = "", **query: str | int) -> JsonObject:
        """Jobs of the queue; `sweep`, `offset`, `limit` as in the API."""
        return self._get("/jobs", {"state": state, **query})

    def show_job(self, job_id: str) -> JsonObject:
        """One job."""
        return self._get(_name_job(job_id))

    def read_log(self, job_id: str, tail_bytes: int = 1 << 16) -> str:
        """The end of what a job has printed."""
        return self._get(f"{_name_job(job_id)}/log", {"tail_bytes": tail_bytes})["text"]

    def list_configs(self) -> list[str]:
        """Configurations that may be submitted."""
        return self._get("/configs")["configs"]

    def submit(
        self, config: str, overrides: Mapping[str, JsonValue] | None = None, *, slots: int = 1,
        dry_run: bool = False,
    ) -> JsonObject:  # fmt: skip
        """Queue a run; with `dry_run` only say what the checks say."""
        body = {"config": config, "overrides": dict(overrides or {}), "slots": slots}
        return self._post("/submit", {**body, "dry_run": dry_run})

    def stop(self, job_id: str) -> JsonObject:
        """Ask a job to save a checkpoint and end."""
        return self._post(f"{_name_job(job_id)}/stop")

    def reopen(self, job_id: str) -> JsonObject:
        """Let a job that failed or was stopped go on."""
        return self._post(f"{_name_job(job_id)}/reopen")

    def watch(self) -> Iterator[ServiceEvent]:
        """What changes from now on, until the service ends the stream: then ask again."""
        with self._ask("GET", f"{_API}/events", timeout_s=_STREAM_TIMEOUT_S) as answer:
            kind = ""
            try:
                for line in iter(answer.readline, b""):
                    name, _, text = line.decode().rstrip("\r\n").partition(": ")
                    if name == "event":
                        kind = text
                    elif name == "data":
                        yield ServiceEvent(kind, json.loads(text))
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise ServiceRefusal(0, f"the stream of {self._place} broke: {error}") from error

    def _get(self, place: str, query: Query | None = None) -> JsonObject:
        pairs = [
            (name, _write(one))
            for name, value in (query or {}).items()
            for one in _list(value)
            if one is not None
        ]  # fmt: skip
        return self._read("GET", f"{_API}{place}" + (f"?{urlencode(pairs)}" if pairs else ""))

    def _post(self, place: str, body: JsonValue = None) -> JsonObject:
        return self._read("POST", f"{_API}{place}", body)

    def _read(self, method: str, place: str, body: JsonValue = None) -> JsonObject:
        with self._ask(method, place, body, timeout_s=self._timeout_s) as answer:
            try:
                return json.loads(answer.read())
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise ServiceRefusal(0, f"{self._place} gave no whole answer: {error}") from error

    @contextlib.contextmanager
    def _ask(
        self, method: str, place: str, body: JsonValue = None, *, timeout_s: float
    ) -> Iterator[http.client.HTTPResponse]:
        """The answer to a request, if it is a good one.

        Raises:
          ServiceRefusal: it is none, or nobody answers.
        """
        connection = self._connect(timeout_s)
        headers, content = dict(self._headers), None
        if body is not None:
            headers["Content-Type"] = "application/json"
            content = json.dumps(body, allow_nan=False)
        try:
            try:
                connection.request(method, place, content, headers)
                answer = connection.getresponse()
                if answer.status != 200:
                    raise ServiceRefusal(answer.status, _read_detail(answer))
            except (OSError, http.client.HTTPException) as error:
                raise ServiceRefusal(
                    0, f"{self._place} does not answer: {error}; is python -m tools.serve running?"
                ) from error
            yield answer
        finally:
            connection.close()

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._is_secure:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self._place, timeout=timeout_s, context=context)
        return http.client.HTTPConnection(self._place, timeout=timeout_s)


def _name_run(run: str) -> str:
    experiment, slash, name = run.partition("/")
    if not slash or not experiment or not name:
        raise UserError(f"run ({run!r}) is no run; write experiment/name")
    return f"/runs/{quote(experiment, safe='')}/{quote(name, safe='')}"


def _name_job(job_id: str) -> str:
    if not job_id:
        raise UserError("job: it is empty; give the id of a job")
    return f"/jobs/{quote(job_id, safe='')}"


def _write(value: str | int | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read_detail(answer: http.client.HTTPResponse) -> str:
    text = answer.read(1 << 16).decode("utf-8", errors="replace")
    try:
        return str(json.loads(text)["detail"])
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status}, and no reason"


def _list(value: str | int | bool | Sequence[str] | None) -> Sequence[str | int | bool | None]:
    return [value] if isinstance(value, str | int | None) else value
