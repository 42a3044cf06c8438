"""The frame of all pages: head, addresses, times and sizes in words."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import quote, urlencode

from store.formatting import format_time
from utils.json_types import JsonValue

PAGES = (
    ("Runs", "/"),
    ("Compare", "/compare"),
    ("Sweeps", "/sweeps"),
    ("Queue", "/queue"),
    ("Submit", "/submit"),
    ("Trends", "/trends"),
)


@dataclass(frozen=True)
class Frame:
    """The head of a page."""

    page: str  # as in `PAGES`, or empty
    who: str = ""  # the caller; empty without a sign-in
    role: str = ""
    pages: tuple[tuple[str, str], ...] = PAGES

    @property
    def may_submit(self) -> bool:
        """Whether to show forms that change something."""
        return self.role in ("submit", "admin")


class ShownTime(NamedTuple):
    """A moment for people, and the same in full."""

    text: str
    full: str
    iso: str


def show_time(seconds: JsonValue, now: float) -> ShownTime | None:
    """Format a time: how long ago if recent, else the day; None if it is unknown."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < 1e11:
        return None
    ago, full = now - seconds, format_time(seconds)
    text = full
    if 0 <= ago < 60:
        text = "just now"
    elif 0 <= ago < 3600:
        text = f"{ago // 60:.0f} min ago"
    elif 0 <= ago < 86400:
        text = f"{ago // 3600:.0f} h ago"
    iso = datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="seconds")
    return ShownTime(text, full, iso)


def link_run(path: str) -> str:
    """Return the address of a run's page."""
    return "/runs/" + "/".join(quote(part, safe="") for part in path.split("/"))


def link_api(path: str, *more: str) -> str:
    """Return the API's address of a run, or of a part of it."""
    return "/api/v1" + link_run(path) + "".join(f"/{quote(part, safe='')}" for part in more)


def link_page(url: str, query: Mapping[str, str]) -> str:
    """Return an address with its query; empty values are left out."""
    text = urlencode({key: value for key, value in query.items() if value})
    return f"{url}?{text}" if text else url


def format_bytes(count: int) -> str:
    """Format a size as 1.4 MB, in powers of 1,000."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
