"""Names and ids of runs, and names of the files that each of them has."""

from __future__ import annotations

import re
import secrets
import time
import uuid
from typing import TypeGuard

from utils.errors import UserError

RUN_FILE = "run.json"
CONFIG_FILE = "config_resolved.yaml"
_NAME = re.compile(r"(?!\.)[\w.\-]{1,128}")


def check_name(key: str, name: str) -> None:
    """Refuse a name that is not one component of a path; UserError names the key."""
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{key} ({name!r}) is not a valid name; use at most 128 letters, digits, dots, dashes "
            "and underscores, and no dot at the beginning"
        )


def create_id(after: str = "") -> str:
    """Create a UUID of version 7 (RFC 9562) sorting after `after` even if the clock went back."""
    milliseconds = time.time_ns() // 1_000_000
    if after:
        milliseconds = max(milliseconds, (uuid.UUID(after).int >> 80) + 1)
    random = secrets.randbits(74)
    high, low = random >> 62, random & (1 << 62) - 1
    return str(uuid.UUID(int=milliseconds << 80 | 7 << 76 | high << 64 | 2 << 62 | low))


def create_run_name(seed: int) -> str:
    """Create a name of time, seed and six random hex digits, unique if programs start together."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-seed{seed}-{secrets.token_hex(3)}"


def is_id(text: object) -> TypeGuard[str]:
    """Return whether a text is an id of this form."""
    try:
        return isinstance(text, str) and uuid.UUID(text).version == 7
    except ValueError:
        return False
