"""`attempts.jsonl`: each start and end of a program on a run; an end that is missing was a kill."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from store.record.history import append_line, parse_lines
from utils.json_types import JsonObject, is_count, is_time

ATTEMPTS_FILE = "attempts.jsonl"


def _is_text(value: object) -> bool:
    return isinstance(value, str)


# What an attempt tells -> whether a value can be that.
_FIELDS: dict[str, Callable[[object], bool]] = {
    "host": _is_text, "pid": is_count, "began": is_time, "from_step": is_count,
    "hardware": lambda value: isinstance(value, dict), "source": _is_text, "ended": is_time,
    "to_step": is_count, "status": _is_text, "reason": _is_text,
}  # fmt: skip


def read_attempts(folder: Path) -> list[JsonObject]:
    """The attempts of a run in their order: number, host, from_step, began, and how each ended."""
    path = folder / ATTEMPTS_FILE
    if not path.is_file():
        return []
    return merge_attempts(path.read_text(encoding="utf-8", errors="replace"))


def merge_attempts(text: str) -> list[JsonObject]:
    """The same from the file's text; a field of another kind than it should be counts as unknown.

    So whoever reads attempts needs no check of his own.
    """
    found: dict[int, JsonObject] = {}
    for line in parse_lines(text):
        number = line.get("attempt")
        if is_count(number):
            known = {k: v for k, v in line.items() if k not in _FIELDS or _FIELDS[k](v)}
            found.setdefault(number, {}).update(known)
    return [found[number] for number in sorted(found)]


def read_hardware(facts: JsonObject, attempt: JsonObject) -> JsonObject:
    """What an attempt worked on; attempts of earlier programs did not tell all, the run did."""
    several = (facts.get("environment"), attempt.get("hardware"))
    return {key: value for one in several if isinstance(one, dict) for key, value in one.items()}


def count_devices(hardware: JsonObject) -> int:
    """How many devices an attempt worked on; one where nothing is told of them."""
    told = (hardware.get("devices"), hardware.get("world_size"))
    return next((one for one in told if is_count(one) and one > 0), 1)


def format_utc(seconds: float) -> str:
    """Seconds since 1970 as ISO 8601: 2026-11-22T08:53:03Z."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def begin_attempt(folder: Path, from_step: int, hardware: JsonObject, source: str = "") -> int:
    """Note that a program goes on with a run; gives the attempt's number, 1 for the first.

    Args:
      hardware: kind and number of devices, and whatever else a bill depends on.
      source: which state of the source the program was started from; empty: nobody knows.
    """
    number = 1 + max((one["attempt"] for one in read_attempts(folder)), default=0)
    facts = {"host": socket.gethostname(), "pid": os.getpid(), "began": time.time()}
    facts |= {"from_step": from_step, "hardware": hardware}
    _append(folder, {"attempt": number, **facts, **({"source": source} if source else {})})
    return number


def end_attempt(folder: Path, number: int, step: int, status: str, reason: str = "") -> None:
    """Note how an attempt ended, and after which step."""
    ended = {"attempt": number, "ended": time.time(), "to_step": step, "status": status}
    _append(folder, {**ended, **({"reason": reason} if reason else {})})


def _append(folder: Path, line: JsonObject) -> None:
    with (folder / ATTEMPTS_FILE).open("ab+") as file:
        append_line(file, line)
