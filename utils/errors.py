"""Errors that users can fix, hints for misspelled names, and exit codes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Exit codes of programs; 128 plus the number of a signal that has ended one.
EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: no fault, run again
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class UserError(ValueError):
    """An error that the user can fix: one sentence with key, value, rule and way out.

    `code` is one of `utils.error_codes`, by default that of the room that raises the error; `key`
    and `value` are by default those that the sentence begins with.
    """

    def __init__(
        self, message: str, *, code: str = "", key: str = "", value: object = None
    ) -> None:
        super().__init__(message)
        self.code, self.key, self.value = code, key, value


def get_near_names(name: str, candidates: Iterable[str], limit: int = 3) -> list[str]:
    """Return up to `limit` candidates similar to `name`, best first."""
    return difflib.get_close_matches(name, list(candidates), n=limit, cutoff=0.5)


def get_hint(name: str, candidates: Iterable[str]) -> str:
    """Return `did you mean 'a' or 'b'?`, or all candidates if none is similar."""
    candidates = sorted(candidates)
    near = get_near_names(name, candidates)
    if near:
        return "did you mean " + " or ".join(repr(n) for n in near) + "?"
    return "known: " + ", ".join(candidates)
