"""Formats numbers and times, the same for terminal and pages."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence

from utils.json_types import JsonValue

# Tone -> statuses, verdicts, outcomes and faults. Its colour is never the only distinction.
_TONES = {
    "good": ("complete", "better", "pass", "fits"),
    "busy": ("running",),
    "warn": ("stopping", "waiting", "preempted", "interrupted", "stopped", "undecided", "torn",
             "missing"),
    "bad": ("failed", "killed", "damaged", "stalled", "diverged", "worse", "much worse", "fail",
            "does not fit", "damage"),
    "dim": ("too few", "skipped"),
    "odd": ("odd",),
}  # fmt: skip
TONES = {word: tone for tone, words in _TONES.items() for word in words}
_BARS = "▁▂▃▄▅▆▇█"


def format_sample(mean: float, sd: float | None, n: int, runs: int) -> str:
    """Format 92.56 ± 1.39 (3), with the number of seeds, and of runs if there are more."""
    counts = f" ({count_runs(runs, n)})" if runs > n else f" ({n})" * (n > 1)
    return f"{format_value(mean)}{'' if sd is None else f' ± {sd:.3g}'}{counts}"


def count_runs(runs: int, seeds: int) -> str:
    """Format 3 runs of 1 seed."""
    return f"{runs} run{'s' * (runs != 1)} of {seeds} seed{'s' * (seeds != 1)}"


def format_value(value: JsonValue) -> str:
    """Format a number with five digits; other values do not change."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value if isinstance(value, str) else json.dumps(value)
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:.5g}"


def format_time(seconds: JsonValue) -> str:
    """Format local time to the minute."""
    if not isinstance(seconds, int | float):
        return "-"
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def name_few(names: Sequence[str], most: int = 6) -> str:
    """Format the first names, and the number of further ones."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def format_duration(seconds: float) -> str:
    """Format 3 h 05 min, 12 min 30 s, 8.1 s."""
    if seconds >= 3600:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f} min"
    if seconds >= 60:
        return f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"
    return f"{seconds:.1f} s"


def format_least(seconds: float | None, *, is_least: bool) -> str:
    """Format a duration that may be longer: ≥ 3.4 s; `-` if unknown."""
    return "-" if seconds is None else f"{'≥ ' if is_least else ''}{format_duration(seconds)}"


def draw_line(values: Sequence[float], width: int = 40) -> str:
    """Draw a curve in one line: the mean of each column; a cross if none of it was finite."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    columns = [[v for v in values[a:b] if math.isfinite(v)] for a, b in zip(edges, edges[1:])]  # noqa: B905, RUF007
    means = [sum(column) / len(column) if column else None for column in columns]
    known = [mean for mean in means if mean is not None]
    low, span = min(known, default=0.0), (max(known, default=0.0) - min(known, default=0.0)) or 1.0
    return "".join(
        "×" if mean is None else _BARS[min(7, int(8 * (mean - low) / span))] for mean in means
    )
