"""The templates' environment: every value is escaped, and a misspelled name is an error."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from service.web.views.figures import draw_spark
from service.web.views.frame import ShownTime, format_bytes, link_api, link_run, show_time
from service.web.views.sweeps import describe_point
from store.formatting import TONES, format_duration, format_value
from store.quality.bill import format_usd
from store.quality.trends import Trend, describe_trend
from utils.storage.installation import name_commands

# Most reports that a trend's picture shows.
_SPARK = 40
TEMPLATES = Path(__file__).parents[1] / "templates"


class _Loader(FileSystemLoader):
    """The templates, which name the commands of a checkout."""

    def get_source(
        self, environment: Environment, template: str
    ) -> tuple[str, str, Callable[[], bool]]:
        source, path, is_fresh = super().get_source(environment, template)
        return name_commands(source), path, is_fresh


def create_environment() -> Environment:
    """Create the environment of `templates/`, with a filter for each kind of value."""
    environment: Any = Environment(
        loader=_Loader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    texts: dict[str, Callable[[str], str]] = {
        "dash": lambda cell: "–" if cell == "-" else cell,
        "tone": lambda word: TONES.get(word, ""),
    }
    trends: dict[str, Callable[[Trend], str]] = {
        "spark": lambda trend: draw_spark(trend.values[-_SPARK:])
    }
    times: dict[str, Callable[[float | None], ShownTime | None]] = {
        "moment": lambda seconds: show_time(seconds, time.time())
    }
    environment.filters |= texts | trends | times
    environment.filters |= {
        "api_url": link_api,
        "bytes": format_bytes,
        "duration": format_duration,
        "json": json.dumps,
        "number": format_value,
        "point": describe_point,
        "run_url": link_run,
        "trend": describe_trend,
        "usd": format_usd,
    }
    return environment
