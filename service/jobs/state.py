"""The state of a job, computed from its events by `fold_events`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

from utils.json_types import JsonObject

State = Literal["queued", "running", "stopping", "waiting", "complete", "failed", "stopped"]
STATES = get_args(State)
# Final states.
ENDS = ("complete", "failed", "stopped")


@dataclass
class Attempt:
    """One program of a job.

    Attributes:
      pid, born: of the program that holds the job's lock, with its start in seconds since 1970.
      main_pid, main_born: of `main.py`; 0 before its start.
      code: its exit code; None before its end or if its end was not observed.
      saved_step: of the run's newest checkpoint at its end.
    """

    pid: int
    born: float
    began: float
    main_pid: int = 0
    main_born: float = 0.0
    ended: float | None = None
    code: int | None = None
    saved_step: int = 0
    slots: tuple[str, ...] = ()


@dataclass
class JobProgress:
    """State of a job according to its events.

    Attributes:
      state: as in `JobView`; `running` until an attempt's end has been recorded.
      not_before: when a waiting job may continue, in seconds since 1970.
      stop_by: who requested its stop; empty without a request.
      reason: of its state, for people.
      forgotten: attempts whose crashes no longer count.
    """

    state: State = "queued"
    attempts: list[Attempt] = field(default_factory=list)
    not_before: float = 0.0
    stop_by: str = ""
    reason: str = ""
    changed: float = 0.0
    forgotten: int = 0

    @property
    def is_over(self) -> bool:
        """Whether the state is final."""
        return self.state in ENDS

    @property
    def slots(self) -> tuple[str, ...]:
        """Slots that its program holds; empty if none runs."""
        return self.attempts[-1].slots if self.is_open else ()

    @property
    def is_open(self) -> bool:
        """Whether the last attempt has no recorded end."""
        return bool(self.attempts) and self.attempts[-1].ended is None


@dataclass(frozen=True)
class JobView:
    """A job as people and programs see it.

    Attributes:
      id: directory below the queue.
      run: `experiment/run_id` in the store.
      state: queued, running, stopping, waiting (it continues by itself), complete, failed, stopped.
      argv: the command.
      created, changed: seconds since 1970.
      attempts: programs that have been started.
      exit_code: of the last one; null before its end or if its end was not observed.
    """

    id: str
    run: str
    state: State
    argv: tuple[str, ...]
    config: str
    config_hash: str
    created: float
    changed: float
    who: str
    attempts: int
    exit_code: int | None
    reason: str
    sweep: str
    slots: int

    @property
    def may_stop(self) -> bool:
        """Whether a stop request makes sense now."""
        return self.state not in (*ENDS, "stopping")

    @property
    def may_reopen(self) -> bool:
        """Whether it can continue after its end."""
        return self.state in ("failed", "stopped")


def fold_events(events: Iterable[JsonObject]) -> JobProgress:
    """Compute a job's state from its events, the oldest first; skip unknown and damaged ones."""
    job = JobProgress()
    for event in events:
        fields = {"time": _NUMBER, **_FIELDS.get(str(event.get("event")), {})}
        if not all(isinstance(event.get(name), kind) for name, kind in fields.items()):
            continue
        job.changed = float(event["time"])
        handlers = _AFTER_END if job.is_over else _BEFORE_END
        handler = handlers.get(str(event.get("event")))
        if handler is not None:
            handler(job, event)
    return job


def _start(job: JobProgress, event: JsonObject) -> None:
    slots = tuple(map(str, event["slots"]))
    job.attempts.append(Attempt(event["pid"], event["born"], event["time"], slots=slots))
    job.state = "stopping" if job.stop_by else "running"
    job.reason = ""


def _launch(job: JobProgress, event: JsonObject) -> None:
    if job.attempts:
        job.attempts[-1].main_pid = event["pid"]
        job.attempts[-1].main_born = event["born"]


def _end(job: JobProgress, event: JsonObject) -> None:
    if job.attempts:
        last = job.attempts[-1]
        last.ended, last.code = event["time"], event.get("code")
        last.saved_step = event["saved_step"]


def _wait(job: JobProgress, event: JsonObject) -> None:
    job.state, job.not_before, job.reason = "waiting", event["until"], event["reason"]


def _stop(job: JobProgress, event: JsonObject) -> None:
    job.stop_by = event["who"] or "somebody"
    if job.state in ("queued", "running", "waiting"):
        job.state = "stopping"


def _finish(job: JobProgress, event: JsonObject) -> None:
    if event["state"] in ENDS:
        job.state, job.reason = event["state"], event["reason"]


def _reopen(job: JobProgress, event: JsonObject) -> None:
    """Continue a job as if it were new; its crashes no longer count."""
    if job.state in ("failed", "stopped"):
        job.state, job.reason, job.stop_by, job.not_before = "queued", "", "", 0.0
        job.forgotten = len(job.attempts)


_NUMBER = (int, float)
_FIELDS = {
    "started": {"pid": int, "born": _NUMBER, "slots": list},
    "launched": {"pid": int, "born": _NUMBER},
    "ended": {"code": (int, type(None)), "saved_step": int},
    "waits": {"until": _NUMBER, "reason": str},
    "stop": {"who": str},
    "finished": {"state": str, "reason": str},
}
# After a job's end no event changes its state except a reopening.
_BEFORE_END = {
    "started": _start, "launched": _launch, "ended": _end, "waits": _wait, "stop": _stop,
    "finished": _finish,
}  # fmt: skip
_AFTER_END = {"reopened": _reopen}
