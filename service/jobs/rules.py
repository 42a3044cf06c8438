"""What comes after a program's end: the rules of `train/supervise.sh`, as a function of events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from service.jobs.state import Attempt, JobProgress
from utils.errors import EXIT_PREEMPTED, EXIT_USER_ERROR


@dataclass(frozen=True)
class Patience:
    """How long a job that fails is borne with.

    Attributes:
      crashes: and soon preemptions in a row, without a new checkpoint between them.
      backoff_s: pause after the first of them; doubled by each further one, up to `most_s`.
      soon_s: a preemption within this time of the start is a soon one.
    """

    crashes: int = 5
    backoff_s: float = 10.0
    most_s: float = 600.0
    soon_s: float = 300.0


@dataclass(frozen=True)
class Decision:
    """What comes next; `pause_s` before a job goes on."""

    state: Literal["complete", "failed", "stopped", "again"]
    reason: str
    pause_s: float = 0.0


def decide(progress: JobProgress, *, is_complete: bool, patience: Patience) -> Decision:
    """What comes after the end of a job's last attempt.

    Args:
      is_complete: whether the run itself says that it has come to its end.
    """
    end = find_end(progress, is_complete=is_complete)
    return end or _bear(progress, patience)


def find_end(progress: JobProgress, *, is_complete: bool) -> Decision | None:
    """The end that the last attempt has brought; none: how patient one is decides.

    Args:
      is_complete: as for `decide`.
    """
    last = progress.attempts[-1]
    if last.code == 0 or is_complete:
        return Decision("complete", "")
    if progress.stop_by:
        return Decision("stopped", f"asked to by {progress.stop_by}; {_name(last)}")
    if last.code == EXIT_USER_ERROR:
        return Decision(
            "failed", "the run refused its configuration (exit code 2), which another try cannot "
            "mend; its log says why"
        )  # fmt: skip
    return None


def _bear(progress: JobProgress, patience: Patience) -> Decision:
    """What comes after a preemption or a crash."""
    last = progress.attempts[-1]
    if last.code == EXIT_PREEMPTED and not _is_soon(last, patience):
        return Decision("again", "preempted (exit code 75)")
    crashes, pauses = _count(progress.attempts[progress.forgotten :], patience)
    what = "preempted" if last.code == EXIT_PREEMPTED else "crashed"
    if crashes > patience.crashes:
        return Decision(
            "failed", f"{what}, {crashes} in a row without a new checkpoint; {_name(last)}"
        )
    pause = min(patience.backoff_s * 2 ** min(pauses - 1, 16), patience.most_s)
    reason = f"{what} ({_name(last)}), {crashes} of {patience.crashes} in a row"
    return Decision("again", reason, pause)


def _count(attempts: list[Attempt], patience: Patience) -> tuple[int, int]:
    """Crashes since the last new checkpoint, and those in a row after which a pause was made."""
    crashes = pauses = saved = 0
    for one in attempts:
        is_preempted = one.code == EXIT_PREEMPTED
        if is_preempted and not _is_soon(one, patience):
            crashes = pauses = 0
        else:
            if one.saved_step > saved:
                crashes = 0
                # A machine that lets a start save and nothing more is given longer and longer.
                pauses = pauses if is_preempted else 0
            crashes, pauses = crashes + 1, pauses + 1
        saved = max(saved, one.saved_step)
    return crashes, pauses


def _is_soon(attempt: Attempt, patience: Patience) -> bool:
    return (attempt.ended or 0.0) - attempt.began < patience.soon_s


def _name(attempt: Attempt) -> str:
    return "killed" if attempt.code is None else f"exit code {attempt.code}"
