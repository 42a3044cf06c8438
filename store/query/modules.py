"""`modules.json`: where the time of a profiled step went; and the request for a profile."""

from __future__ import annotations

import json
from pathlib import Path

from utils.json_types import is_count
from utils.storage.local import write_atomically

MODULES_FILE = "modules.json"
SCHEMA_VERSION = 1
# Written by other programs into a run's directory; the run looks for it at its log points.
REQUEST_FILE = "profile_request.json"
MOST_STEPS = 1000


def request_profile(folder: Path, steps: int) -> None:
    """Ask a run to profile its next steps."""
    write_atomically(folder / REQUEST_FILE, json.dumps({"steps": steps}) + "\n")


def take_request(folder: Path) -> int:
    """Remove a request for a profile; return its steps, or 0 without a whole one."""
    path = folder / REQUEST_FILE
    try:
        steps = json.loads(path.read_text(encoding="utf-8"))["steps"]
    except FileNotFoundError:
        return 0
    except (OSError, ValueError, KeyError, TypeError):
        steps = 0
    path.unlink(missing_ok=True)
    return steps if is_count(steps) and steps <= MOST_STEPS else 0
