"""The templates' environment: every value is escaped, a name that is misspelled is an error."""

from __future__ import annotations

import json
import time
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from service.web.views.frame import format_bytes, link_run, show_time
from store.formatting import TONES, format_value

TEMPLATES = Path(__file__).with_name("templates")


def create_environment() -> Environment:
    """The environment of `templates/`, with a filter for each kind of value that pages show."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "bytes": format_bytes,
        "dash": lambda cell: "–" if cell == "-" else cell,
        "json": json.dumps,
        "moment": lambda seconds: show_time(seconds, time.time()),
        "number": format_value,
        "run_url": link_run,
        "tone": lambda word: TONES.get(word, ""),
    }
    return environment
