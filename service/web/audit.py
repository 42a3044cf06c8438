"""`audit.jsonl`: a line for each change and its author, only ever appended to."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from store.record.attempts import format_utc
from store.record.history import parse_lines
from utils.json_types import JsonObject

AUDIT_FILE = "audit.jsonl"
_TAIL_BYTES = 1 << 20


class AuditLog:
    """The file; each line is on the disk before the answer is sent."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / AUDIT_FILE

    def add(self, who: str, action: str, **details: str | int) -> None:
        """Append a line."""
        now = time.time()
        line = {"time": now, "utc": format_utc(now), "who": who, "action": action, **details}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            # One write, so that lines of several processes do not mix.
            os.write(handle, (json.dumps(line) + "\n").encode())
            os.fsync(handle)
        finally:
            os.close(handle)

    def read(self, limit: int) -> list[JsonObject]:
        """Read the newest lines, the newest first."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _TAIL_BYTES))
                text = file.read().decode("utf-8", errors="replace")
        except FileNotFoundError:
            return []
        return parse_lines(text)[::-1][:limit]
