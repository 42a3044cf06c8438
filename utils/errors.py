"""The one error class for what a user can fix, the words for near misses, and exit codes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# What the programs' exit codes mean; 128 and a signal's number where one ended the program.
EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong, come again
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class UserError(ValueError):
    """Something the user can fix: one sentence with key, value, rule and way out.

    Programs print its text in one line, without a traceback, and exit with code 2.
    """


def get_near_names(name: str, candidates: Iterable[str], limit: int = 3) -> list[str]:
    """Up to `limit` candidates that look like `name`, best first; maybe none."""
    return difflib.get_close_matches(name, list(candidates), n=limit, cutoff=0.5)


def get_hint(name: str, candidates: Iterable[str]) -> str:
    """`did you mean 'a' or 'b'?`, or the list of all candidates if none is near."""
    candidates = sorted(candidates)
    near = get_near_names(name, candidates)
    if near:
        return "did you mean " + " or ".join(repr(n) for n in near) + "?"
    return "known: " + ", ".join(candidates)
