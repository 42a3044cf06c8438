"""`ServiceClient`: the operations of the service for programs, with the standard library only.

    client = ServiceClient("http://127.0.0.1:8080", token)
    job = client.submit("configs/digits_student.yaml", {"optim.lr": 0.002})["job"]
    for event in client.watch():
        ...

Answers are JSON as `/api/v1/openapi.json` describes it. A refusal is a `ServiceRefusal` with the
status and the sentence that explains it. The token never goes to another host: no redirect is
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
    """A refusal by the service; `status` as in HTTP, 0 if it did not answer."""

    def __init__(self, status: int, detail: str, code: str = "") -> None:
        super().__init__(detail, code=code)
        self.status = status


class ServiceEvent(NamedTuple):
    """A change: kind `run`, `job` or `runs`, and the item."""

    kind: str
    facts: JsonObject


class ServiceClient:
    """A client of one service.

    Args:
      url: as http://127.0.0.1:8080, without a path.
      token: created by `python -m tools.serve --add-token`.

    Raises:
      UserError: malformed url or token.
    """

    def __init__(self, url: str, token: str, timeout_s: float = _TIMEOUT_S) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            raise UserError(f"url ({url!r}) is no address; give one such as http://127.0.0.1:8080")
        if not token.isascii() or not token.isprintable() or not token:
            raise UserError("token is malformed; create one by tools.serve --add-token")
        self._is_secure, self._host = parts.scheme == "https", parts.netloc
        self._headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        self._timeout_s = timeout_s

    def whoami(self) -> JsonObject:
        """Return the token's owner and role."""
        return self._get("/whoami")

    def list_runs(self, filter: str = "", **query: str | int | bool) -> JsonObject:
        """List runs of a filter; `sort`, `reverse`, `show`, `offset`, `limit` as in the API."""
        return self._get("/runs", {"filter": filter, **query})

    def show_run(self, run: str) -> JsonObject:
        """Return all of `experiment/name` but its history."""
        return self._get(_name_run(run))

    def list_metrics(self, run: str) -> list[str]:
        """List the numbers of a run that have curves."""
        return self._get(f"{_name_run(run)}/metrics")["keys"]

    def read_series(
        self,
        run: str,
        metrics: Sequence[str],
        *,
        start: float | None = None,
        end: float | None = None,
        width: int = 600,
        x: str = "step",
    ) -> JsonObject:
        """Read curves over a part of axis x (step, epoch, time): at most 2 x width points each."""
        query: JsonObject = {"metric": metrics, "start": start, "end": end, "width": width, "x": x}
        return self._get(f"{_name_run(run)}/series", query)

    def download(self, run: str, artifact_id: str, target: Path) -> None:
        """Write a file of a run to `target`; a transfer that breaks leaves no file."""
        path = f"{_API}{_name_run(run)}/artifacts/{quote(artifact_id, safe='')}"
        partial = target.with_name(target.name + ".part")
        with self._request("GET", path, timeout_s=self._timeout_s) as answer:
            try:
                with partial.open("wb") as file:
                    while chunk := answer.read(_CHUNK):
                        file.write(chunk)
                partial.replace(target)
            except (OSError, http.client.HTTPException) as error:
                raise ServiceRefusal(0, f"{self._host} ended in the middle: {error}") from error
            finally:
                partial.unlink(missing_ok=True)

    def compare(self, sides: Sequence[str], metrics: str = "", exact: bool = False) -> JsonObject:
        """Compare sides with the first one: RUN, several with commas, or NAME:FILTER."""
        return self._get("/compare", {"run": sides, "metrics": metrics, "exact": exact})

    def gate(
        self,
        base: str,
        new: str,
        gates: Sequence[str],
        undecided: str = "",
        unfinished: bool = False,
    ) -> JsonObject:
        """Check whether `new` is worse than `base` by more than gates allow."""
        return self._get(
            "/gates",
            {
                "base": base,
                "new": new,
                "gate": gates,
                "undecided": undecided,
                "unfinished": unfinished,
            },
        )

    def list_trends(self) -> JsonObject:
        """List benchmark reports over time."""
        return self._get("/trends")

    def list_sweeps(self) -> list[str]:
        """List the names of sweeps."""
        return self._get("/sweeps")["sweeps"]

    def show_sweep(self, name: str) -> JsonObject:
        """Return a sweep's trials and tables."""
        return self._get(f"/sweeps/{quote(name, safe='')}")

    def list_jobs(self, state: str = "", **query: str | int) -> JsonObject:
        """List jobs of the queue; `sweep`, `offset`, `limit` as in the API."""
        return self._get("/jobs", {"state": state, **query})

    def show_job(self, job_id: str) -> JsonObject:
        """Return one job."""
        return self._get(_name_job(job_id))

    def read_log(self, job_id: str, tail_bytes: int = 1 << 16) -> str:
        """Read the end of a job's output."""
        return self._get(f"{_name_job(job_id)}/log", {"tail_bytes": tail_bytes})["text"]

    def list_configs(self) -> list[str]:
        """List the configurations that may be submitted."""
        return self._get("/configs")["configs"]

    def submit(
        self,
        config: str,
        overrides: Mapping[str, JsonValue] | None = None,
        *,
        slots: int = 1,
        dry_run: bool = False,
    ) -> JsonObject:
        """Queue a run; with `dry_run` only return the result of the checks."""
        body = {"config": config, "overrides": dict(overrides or {}), "slots": slots}
        return self._post("/submit", {**body, "dry_run": dry_run})

    def stop(self, job_id: str) -> JsonObject:
        """Request that a job saves a checkpoint and ends."""
        return self._post(f"{_name_job(job_id)}/stop")

    def reopen(self, job_id: str) -> JsonObject:
        """Continue a job that failed or was stopped."""
        return self._post(f"{_name_job(job_id)}/reopen")

    def watch(self) -> Iterator[ServiceEvent]:
        """Yield changes from now on until the service ends the stream: then call again."""
        with self._request("GET", f"{_API}/events", timeout_s=_STREAM_TIMEOUT_S) as answer:
            kind = ""
            try:
                for line in iter(answer.readline, b""):
                    name, _, text = line.decode().rstrip("\r\n").partition(": ")
                    if name == "event":
                        kind = text
                    elif name == "data":
                        yield ServiceEvent(kind, json.loads(text))
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise ServiceRefusal(0, f"the stream of {self._host} broke: {error}") from error

    def _get(self, path: str, query: Query | None = None) -> JsonObject:
        lists = {k: [v] if isinstance(v, str | int | None) else v for k, v in (query or {}).items()}
        pairs = [
            (name, str(value).lower() if isinstance(value, bool) else str(value))
            for name, values in lists.items()
            for value in values
            if value is not None
        ]
        return self._read("GET", f"{_API}{path}" + (f"?{urlencode(pairs)}" if pairs else ""))

    def _post(self, path: str, body: JsonValue = None) -> JsonObject:
        return self._read("POST", f"{_API}{path}", body)

    def _read(self, method: str, path: str, body: JsonValue = None) -> JsonObject:
        with self._request(method, path, body, timeout_s=self._timeout_s) as answer:
            try:
                return json.loads(answer.read())
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise ServiceRefusal(0, f"{self._host} gave no whole answer: {error}") from error

    @contextlib.contextmanager
    def _request(
        self, method: str, path: str, body: JsonValue = None, *, timeout_s: float
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request and yield its answer; raise `ServiceRefusal` on a refusal or silence."""
        if self._is_secure:
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(self._host, timeout=timeout_s, context=context)
        else:
            connection = http.client.HTTPConnection(self._host, timeout=timeout_s)
        headers, content = dict(self._headers), None
        if body is not None:
            headers["Content-Type"] = "application/json"
            content = json.dumps(body, allow_nan=False)
        try:
            try:
                connection.request(method, path, content, headers)
                answer = connection.getresponse()
                if answer.status != 200:
                    raise ServiceRefusal(answer.status, *_read_problem(answer))
            except (OSError, http.client.HTTPException) as error:
                raise ServiceRefusal(
                    0, f"{self._host} does not answer: {error}; is python -m tools.serve running?"
                ) from error
            yield answer
        finally:
            connection.close()


def _name_run(run: str) -> str:
    experiment, slash, name = run.partition("/")
    if not slash or not experiment or not name:
        raise UserError(f"run ({run!r}) names no run; write experiment/name")
    return f"/runs/{quote(experiment, safe='')}/{quote(name, safe='')}"


def _name_job(job_id: str) -> str:
    if not job_id:
        raise UserError("job is empty; give the id of a job")
    return f"/jobs/{quote(job_id, safe='')}"


def _read_problem(answer: http.client.HTTPResponse) -> tuple[str, str]:
    """Return a refusal's sentence and its code."""
    text = answer.read(1 << 16).decode("utf-8", errors="replace")
    try:
        problem = json.loads(text)
        return str(problem["detail"]), str(problem.get("type", ""))
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status}, and no reason", ""
