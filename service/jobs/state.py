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
    """One program of a job; times are seconds since 1970."""

    pid: int  # of the program that holds the job's lock
    born: float  # its start
    began: float
    main_pid: int = 0  # of `main.py`; 0 before its start
    main_born: float = 0.0
    ended: float | None = None
    code: int | None = None  # None before its end or if its end was not observed
    saved_step: int = 0  # of the run's newest checkpoint at its end
    slots: tuple[str, ...] = ()


@dataclass
class JobProgress:
    """State of a job according to its events."""

    state: State = "queued"  # `running` until an attempt's end has been recorded
    attempts: list[Attempt] = field(default_factory=list)
    not_before: float = 0.0  # when a waiting job may continue, in seconds since 1970
    stop_by: str = ""  # who requested its stop; empty without a request
    reason: str = ""  # of its state, for people
    changed: float = 0.0
    forgotten: int = 0  # attempts whose crashes no longer count

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
    """A job as people and programs see it."""

    id: str  # directory below the queue
    run: str  # `experiment/run_id` in the store
    # Queued, running, stopping, waiting (it continues by itself), complete, failed, stopped
    state: State
    argv: tuple[str, ...]  # the command
    config: str
    config_hash: str
    # created, changed: seconds since 1970
    created: float
    changed: float
    who: str
    attempts: int  # programs that have been started
    exit_code: int | None  # of the last one; null before its end or if its end was not observed
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
        if all(isinstance(event.get(name), types) for name, types in fields.items()):
            job.changed = float(event["time"])
            # After a job's end no event changes its state except a reopening.
            (_reopen if job.is_over else _apply)(job, event)
    return job


def _apply(job: JobProgress, event: JsonObject) -> None:
    last = job.attempts[-1] if job.attempts else None
    match event.get("event"):
        case "started":
            slots = tuple(map(str, event["slots"]))
            job.attempts.append(Attempt(event["pid"], event["born"], event["time"], slots=slots))
            job.state, job.reason = "stopping" if job.stop_by else "running", ""
        case "launched" if last is not None:
            last.main_pid, last.main_born = event["pid"], event["born"]
        case "ended" if last is not None:
            last.ended, last.code = event["time"], event.get("code")
            last.saved_step = event["saved_step"]
        case "waits":
            job.state, job.not_before, job.reason = "waiting", event["until"], event["reason"]
        case "stop":
            job.stop_by = event["who"] or "somebody"
            job.state = "stopping" if job.state in ("queued", "running", "waiting") else job.state
        case "finished" if event["state"] in ENDS:
            job.state, job.reason = event["state"], event["reason"]


def _reopen(job: JobProgress, event: JsonObject) -> None:
    """Continue a failed or stopped job as if it were new; its crashes no longer count."""
    if event.get("event") == "reopened" and job.state in ("failed", "stopped"):
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
