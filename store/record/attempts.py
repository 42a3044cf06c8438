"""`attempts.jsonl`: the start and end of each attempt; an attempt without an end was killed."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from store.record.history import append_line, parse_lines
from store.record.run_file import RunFacts
from utils.json_types import JsonObject, is_count, is_time

ATTEMPTS_FILE = "attempts.jsonl"


def _is_text(value: object) -> bool:
    return isinstance(value, str)


# Field of an attempt -> whether a value has its type.
_FIELDS: dict[str, Callable[[object], bool]] = {
    "host": _is_text,
    "pid": is_count,
    "began": is_time,
    "from_step": is_count,
    "hardware": lambda value: isinstance(value, dict),
    "source": _is_text,
    "ended": is_time,
    "to_step": is_count,
    "status": _is_text,
    "reason": _is_text,
}


def read_attempts(folder: Path) -> list[JsonObject]:
    """Read the attempts of a run in order; each has the fields of its start and of its end."""
    path = folder / ATTEMPTS_FILE
    if not path.is_file():
        return []
    return merge_attempts(path.read_text(encoding="utf-8", errors="replace"))


def merge_attempts(text: str) -> list[JsonObject]:
    """Parse the attempts of the file's text; a field of a wrong type counts as unknown."""
    attempts: dict[int, JsonObject] = {}
    for line in parse_lines(text):
        number = line.get("attempt")
        if is_count(number):
            known = {k: v for k, v in line.items() if k not in _FIELDS or _FIELDS[k](v)}
            attempts.setdefault(number, {}).update(known)
    return [attempts[number] for number in sorted(attempts)]


def read_hardware(facts: RunFacts, attempt: JsonObject) -> JsonObject:
    """Return the hardware of an attempt; earlier programs recorded it only for the run."""
    return {**facts.environment, **attempt.get("hardware", {})}


def count_devices(hardware: JsonObject) -> int:
    """Return the number of devices of an attempt; 1 if not recorded."""
    counts = (hardware.get("devices"), hardware.get("world_size"))
    return next((count for count in counts if is_count(count) and count > 0), 1)


def format_utc(seconds: float) -> str:
    """Format seconds since 1970 as ISO 8601: 2026-11-22T08:53:03Z."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def begin_attempt(folder: Path, from_step: int, hardware: JsonObject, source: str = "") -> int:
    """Record an attempt's start and the hardware that it pays for; return its number, from 1."""
    number = 1 + max((attempt["attempt"] for attempt in read_attempts(folder)), default=0)
    facts = {"host": socket.gethostname(), "pid": os.getpid(), "began": time.time()}
    facts |= {"from_step": from_step, "hardware": hardware}
    _append(folder, {"attempt": number, **facts, **({"source": source} if source else {})})
    return number


def end_attempt(folder: Path, number: int, step: int, status: str, reason: str = "") -> None:
    """Record how an attempt ended, and after which step."""
    ended = {"attempt": number, "ended": time.time(), "to_step": step, "status": status}
    _append(folder, {**ended, **({"reason": reason} if reason else {})})


def _append(folder: Path, line: JsonObject) -> None:
    with (folder / ATTEMPTS_FILE).open("ab+") as file:
        append_line(file, line)
