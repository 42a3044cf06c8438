"""What the events of a job say: `fold_events` gives where it stands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

from utils.json_types import JsonObject

State = Literal["queued", "running", "stopping", "waiting", "complete", "failed", "stopped"]
STATES = get_args(State)
# From these nothing leads on.
ENDS = ("complete", "failed", "stopped")


@dataclass
class Attempt:
    """One program of a job.

    Attributes:
      pid, born: of the program that holds the job's lock, with its start in seconds since 1970.
      main_pid, main_born: of `main.py`; 0: it had not begun.
      code: its exit code; none: it has not ended, or nobody saw it end.
      saved_step: of the run's newest checkpoint when it ended.
      slots: that it holds.
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
    """Where a job stands, as its events tell.

    Attributes:
      state: as `JobView` has it; `running` until an attempt's end has been noted.
      not_before: when a waiting job may go on, in seconds since 1970.
      stop_by: who has asked it to stop; empty: nobody.
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
        """Whether nothing will happen any more."""
        return self.state in ENDS

    @property
    def slots(self) -> tuple[str, ...]:
        """What its program holds; empty: none runs."""
        return self.attempts[-1].slots if self.is_open else ()

    @property
    def is_open(self) -> bool:
        """Whether an attempt has begun whose end nobody has noted."""
        return bool(self.attempts) and self.attempts[-1].ended is None


@dataclass(frozen=True)
class JobView:
    """A job as people and programs see it.

    Attributes:
      id: directory below the queue.
      run: `experiment/run_id` in the store.
      state: queued, running, stopping, waiting (it goes on by itself), complete, failed, stopped.
      argv: the command.
      created, changed: seconds since 1970.
      attempts: programs that have been started.
      exit_code: of the last one; none: it has not ended, or nobody saw it end.
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
        """Whether it makes sense to stop it now."""
        return self.state not in (*ENDS, "stopping")

    @property
    def may_reopen(self) -> bool:
        """Whether it can go on after its end."""
        return self.state in ("failed", "stopped")


def fold_events(events: Iterable[JsonObject]) -> JobProgress:
    """Where a job stands after its events, the oldest first.

    Unknown ones are passed over, and so are damaged ones: of a torn line nothing is left either.
    """
    found = JobProgress()
    for event in events:
        if not _is_whole(event):
            continue
        found.changed = float(event["time"])
        handlers = _AFTER_END if found.is_over else _BEFORE_END
        handler = handlers.get(str(event.get("event")))
        if handler is not None:
            handler(found, event)
    return found


def _is_whole(event: JsonObject) -> bool:
    """Whether an event has the fields of its kind, each as it is written."""
    fields = {"time": _NUMBER, **_FIELDS.get(str(event.get("event")), {})}
    return all(isinstance(event.get(name), kind) for name, kind in fields.items())


def _start(found: JobProgress, event: JsonObject) -> None:
    slots = tuple(map(str, event["slots"]))
    found.attempts.append(Attempt(event["pid"], event["born"], event["time"], slots=slots))
    found.state = "stopping" if found.stop_by else "running"
    found.reason = ""


def _launch(found: JobProgress, event: JsonObject) -> None:
    if found.attempts:
        found.attempts[-1].main_pid = event["pid"]
        found.attempts[-1].main_born = event["born"]


def _end(found: JobProgress, event: JsonObject) -> None:
    if found.attempts:
        last = found.attempts[-1]
        last.ended, last.code = event["time"], event.get("code")
        last.saved_step = event["saved_step"]


def _wait(found: JobProgress, event: JsonObject) -> None:
    found.state, found.not_before = "waiting", event["until"]
    found.reason = event["reason"]


def _stop(found: JobProgress, event: JsonObject) -> None:
    found.stop_by = event["who"] or "somebody"
    if found.state in ("queued", "running", "waiting"):
        found.state = "stopping"


def _finish(found: JobProgress, event: JsonObject) -> None:
    if event["state"] in ENDS:
        found.state, found.reason = event["state"], event["reason"]


def _reopen(found: JobProgress, event: JsonObject) -> None:
    """It goes on as if it were new; its crashes are forgotten."""
    if found.state in ("failed", "stopped"):
        found.state, found.reason, found.stop_by = "queued", "", ""
        found.not_before = 0.0
        found.forgotten = len(found.attempts)


_NUMBER = (int, float)
_FIELDS = {
    "started": {"pid": int, "born": _NUMBER, "slots": list},
    "launched": {"pid": int, "born": _NUMBER},
    "ended": {"code": (int, type(None)), "saved_step": int},
    "waits": {"until": _NUMBER, "reason": str},
    "stop": {"who": str},
    "finished": {"state": str, "reason": str},
}
# What is noted when a job is over changes nothing, but that it was taken up again.
_BEFORE_END = {
    "started": _start, "launched": _launch, "ended": _end, "waits": _wait, "stop": _stop,
    "finished": _finish,
}  # fmt: skip
_AFTER_END = {"reopened": _reopen}
