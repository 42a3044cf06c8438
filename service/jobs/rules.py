"""Decides what follows a program's end: the rules of `train/supervise.sh` on a job's events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from service.jobs.state import Attempt, JobProgress
from utils.errors import EXIT_PREEMPTED, EXIT_USER_ERROR


@dataclass(frozen=True)
class Patience:
    """Limits for a job that fails."""

    crashes: int = 5  # and early preemptions in a row, without a new checkpoint between them
    backoff_s: float = 10.0  # pause after the first of them; doubled by each further one
    most_s: float = 600.0  # of a pause
    soon_s: float = 300.0  # a preemption within this time of the start is an early one


@dataclass(frozen=True)
class Decision:
    """The next step of a job; `pause_s` before it continues."""

    state: Literal["complete", "failed", "stopped", "again"]
    reason: str
    pause_s: float = 0.0


def decide(progress: JobProgress, *, is_complete: bool, patience: Patience) -> Decision:
    """Decide what follows a job's last attempt; `is_complete` is the run's own status."""
    end = find_end(progress, is_complete=is_complete)
    if end is not None:
        return end
    last = progress.attempts[-1]
    if last.code == EXIT_PREEMPTED and not _is_soon(last, patience):
        return Decision("again", "preempted (exit code 75)")
    crashes, pauses = _count(progress.attempts[progress.forgotten :], patience)
    verb = "preempted" if last.code == EXIT_PREEMPTED else "crashed"
    if crashes > patience.crashes:
        reason = f"{verb}, {crashes} in a row without a new checkpoint; {_name(last)}"
        return Decision("failed", reason)
    pause = min(patience.backoff_s * 2 ** min(pauses - 1, 16), patience.most_s)
    reason = f"{verb} ({_name(last)}), {crashes} of {patience.crashes} in a row"
    return Decision("again", reason, pause)


def find_end(progress: JobProgress, *, is_complete: bool) -> Decision | None:
    """Return the final state after the last attempt; None if the limits decide."""
    last = progress.attempts[-1]
    if last.code == 0 or is_complete:
        return Decision("complete", "")
    if progress.stop_by:
        return Decision("stopped", f"requested by {progress.stop_by}; {_name(last)}")
    if last.code == EXIT_USER_ERROR:
        reason = "the run refused its configuration (exit code 2), which a retry cannot change"
        return Decision("failed", f"{reason}; its log says why")
    return None


def _count(attempts: list[Attempt], patience: Patience) -> tuple[int, int]:
    """Count crashes since the last new checkpoint, and those in a row that were given a pause."""
    crashes = pauses = saved = 0
    for attempt in attempts:
        is_preempted = attempt.code == EXIT_PREEMPTED
        if is_preempted and not _is_soon(attempt, patience):
            crashes = pauses = 0
        else:
            if attempt.saved_step > saved:
                crashes = 0
                # A machine that only lets a start save and no more gets longer and longer pauses.
                pauses = pauses if is_preempted else 0
            crashes, pauses = crashes + 1, pauses + 1
        saved = max(saved, attempt.saved_step)
    return crashes, pauses


def _is_soon(attempt: Attempt, patience: Patience) -> bool:
    return (attempt.ended or 0.0) - attempt.began < patience.soon_s


def _name(attempt: Attempt) -> str:
    return "killed" if attempt.code is None else f"exit code {attempt.code}"
