"""Writes JSON files that people read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from utils.storage.local import write_atomically


def write_json(path: Path, value: Any, *, indent: int = 2) -> None:
    """Write a value as indented JSON, all or nothing; to a device such as /dev/stdout directly."""
    text = json.dumps(value, indent=indent) + "\n"
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
    else:
        write_atomically(path, text)
