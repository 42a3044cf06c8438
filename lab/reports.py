"""Reports of labs, as `runs trend` reads them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from store.record.environment import read_environment
from utils.json_types import JsonObject
from utils.runtime.peaks import name_planned_chip


def create_report(
    lab: str, version: int, options: argparse.Namespace, rows: Sequence[JsonObject]
) -> JsonObject:
    """Create a report of rows; `settings.on` also has the TPU's generation if one is here."""
    settings = {
        name: [str(item) for item in value] if name == "earlier" else value
        for name, value in vars(options).items()
        if name not in ("rest", "words")
    }
    settings = {n: str(v) if isinstance(v, Path) else v for n, v in settings.items()}
    chip = name_planned_chip(options.on) if options.on in ("xla", "tpu") else ""
    return {
        "schema_version": version,
        "lab": lab,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": {**settings, "on": f"{options.on} {chip}".strip()},
        "environment": read_environment(),
        "rows": list(rows),
    }
