"""A run's newest numbers as a table, and its end as a line."""

from __future__ import annotations

import json
import math
import re
import socket
from collections.abc import Sequence
from typing import NamedTuple

import psutil
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from store.formatting import draw_line, format_duration
from store.query.record import RunRecord
from store.record.catalogue import EVAL, LOSS, METRICS, TRAIN
from store.record.claim import is_of_this_machine, is_running
from store.record.history import METRICS_FILE, Line, get_learnt
from store.record.lock import LOCK_FILE
from store.terminal import colour_word
from utils.device_use import DeviceUse
from utils.storage.folder import StorageError
from utils.storage.places import is_remote, to_path

NOT_THERE = "not there"
# Newest values of a curve.
_CURVE = 24
_SHOWN_DEVICES = 8
# Class of an error at the beginning of a reason, which is not shown.
_ERROR = re.compile(r"^\w+: ")


class Row(NamedTuple):
    """One number: now, before that, at its best, and its curve."""

    name: str
    now: str
    before: str = ""
    best: str = ""
    curve: str = ""


def create_view(record: RunRecord, devices: Sequence[DeviceUse] | None, now: float) -> Group:
    """Create the table of a run.

    Args:
      devices: of the run's machine; None if that is not this one.
      now: seconds since 1970.
    """
    title = Text.assemble("  ", (record.path, "bold"), "  ", *_describe_status(record))
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("", "now", "before", "best", "course"):
        table.add_column(name, justify="left" if name in ("", "course") else "right")
    train, evaluations = _find_lines(record, TRAIN), _find_lines(record, EVAL)
    numbers = [_create_row(name, train) for name in _find_terms(train)]
    numbers = numbers or [Row("loss", "not logged yet")]
    scores = [_create_row(name, evaluations) for name in _find_scores(evaluations)[:1]]
    numbers += scores or [Row("score", "not evaluated yet")]
    names = [name for name in (train[-1] if train else {}) if name.endswith("_per_s")]
    names += ["lr"] if train and "lr" in train[-1] else []
    numbers += [*(_create_row(name, train) for name in names), _create_wait_row(train)]
    for row in (*numbers, *_list_machine(train, devices)):
        table.add_row(*row)
    return Group(title, table, Text(f"  {_describe_progress(record, train, now)}"))


def describe_end(record: RunRecord) -> str:
    """Describe a complete run in one line."""
    reason = record.facts.reason or "it has done all its steps"
    lines, end = _find_lines(record, EVAL), ""
    if name := next(iter(_find_scores(lines)), ""):
        final = record.facts.final.get(f"eval_{name}", lines[-1].get(name))
        end = f"; {name} at its end {_format(name, final)}"
    return f"{record.path} is complete: {reason}{end}"


def is_here(record: RunRecord) -> bool:
    """Return whether the run's newest attempt is or was on this machine."""
    return bool(record.attempts) and record.attempts[-1].get("host") == socket.gethostname()


def _describe_status(record: RunRecord) -> list[str | Text | tuple[str, str]]:
    status = record.facts.status or "not begun"
    words: list[str | Text | tuple[str, str]] = [colour_word(status)]
    if status == "running" and _is_dead(record):
        words = [("process died; continue with --resume auto", "red")]
    if status != "running" and record.facts.reason:
        words.append(f": {_ERROR.sub('', record.facts.reason)}")
    if record.attempts:
        attempt = record.attempts[-1]
        hardware = attempt.get("hardware") or {}
        device = hardware.get("device_kind") or hardware.get("device") or "?"
        words.append(f"  attempt {attempt['attempt']} on {attempt.get('host', '?')} ({device})")
    return words


def _is_dead(record: RunRecord) -> bool:
    """Return whether the run's program was on this machine and has died."""
    try:
        owner = json.loads(record.folder.read_texts([LOCK_FILE]).get(LOCK_FILE) or "{}")
    except (ValueError, StorageError):
        return False
    return isinstance(owner, dict) and is_of_this_machine(owner) and not is_running(owner)


def _describe_progress(record: RunRecord, lines: Sequence[Line], now: float) -> str:
    if not lines:
        return "no step has been logged yet"
    last = lines[-1]
    step, total = last["step"], record.config.get("train.steps")
    epochs = record.config.get("train.epochs")
    if not isinstance(total, int):
        is_known = isinstance(epochs, int) and last.get("epoch")
        total = round(step / last["epoch"] * epochs) if is_known else None
    parts = [f"step {step:,}" if total is None else f"step {step:,} of {total:,}"]
    if last.get("epoch") is not None:
        parts.append(f"epoch {last['epoch']:.2f}")
    if total is not None and len(lines) > 1 and record.facts.status == "running":
        steps, seconds = step - lines[-2]["step"], _measure(*lines[-2:])
        if steps > 0 and seconds > 0:
            parts.append(f"about {format_duration((total - step) * seconds / steps)} of steps left")
    if not is_remote(str(record.folder)):
        path = to_path(str(record.folder)) / METRICS_FILE
        parts.append(f"newest line {format_duration(max(0.0, now - path.stat().st_mtime))} ago")
    return ", ".join(parts)


def _measure(before: Line | None, line: Line) -> float:
    """Return the seconds of training between two lines."""
    return (line.get("time_s") or 0.0) - ((before or {}).get("time_s") or 0.0)


def _create_wait_row(lines: Sequence[Line]) -> Row:
    """Create the row of the share of the time in which steps waited for their batch."""
    shares = []
    for before, line in zip([None, *lines], lines, strict=False):
        seconds = _measure(before, line)
        if seconds > 0 and line.get("input_wait_s") is not None:
            shares.append(100 * min(1.0, line["input_wait_s"] / seconds))
    if not shares:
        return Row("input wait", NOT_THERE)
    now, least = f"{shares[-1]:.1f} %", f"{min(shares):.1f} %"
    before = f"{shares[-2]:.1f} %" if len(shares) > 1 else ""
    return Row("input wait", now, before, least, _draw(shares))


def _list_machine(lines: Sequence[Line], devices: Sequence[DeviceUse] | None) -> list[Row]:
    resident = [line.get("host_rss_gib") for line in lines]
    memory = NOT_THERE if not lines or resident[-1] is None else f"{resident[-1]:.2f} GiB"
    known = [value for value in resident if value is not None]
    rows = [Row("host memory, rank 0", memory, curve=_draw(known))]
    if devices is not None:
        host = psutil.virtual_memory()
        used, total = (host.total - host.available) / 2**30, host.total / 2**30
        rows.append(Row("host memory, all", f"{used:.1f} of {total:.0f} GiB"))
    if not devices:
        return [*rows, Row("device duty cycle", NOT_THERE), Row("device memory", NOT_THERE)]
    for number, use in enumerate(devices[:_SHOWN_DEVICES]):
        duty = NOT_THERE if use.duty_percent is None else f"{use.duty_percent:.0f} %"
        rows.append(Row(f"device {number} duty cycle", duty))
        memory = f"{use.used_gib:.1f} of {use.total_gib:.0f} GiB"
        rows.append(Row(f"device {number} memory", memory))
    return rows


def _create_row(name: str, lines: Sequence[Line]) -> Row:
    values = [line[name] for line in lines if name in line]
    finite = [value for value in values if value is not None]
    metric, title, best = METRICS.find(name), name, ""
    if metric and metric.unit not in ("", "1/s"):
        title = f"{name} ({metric.unit})"
    if finite and metric and metric.direction != "none":
        best = _format(name, (min if metric.direction == "lower" else max)(finite))
    before = _format(name, values[-2]) if len(values) > 1 else ""
    return Row(title, _format(name, values[-1]), before, best, _draw(finite))


def _find_lines(record: RunRecord, kind: str) -> list[Line]:
    return [line for line in record.lines if line["kind"] == kind]


def _find_terms(lines: Sequence[Line]) -> list[str]:
    """Return the names of the whole loss and its parts, without a part that is all of it."""
    last = lines[-1] if lines else {}
    total, names = f"{LOSS}total", [name for name in last if name.startswith(LOSS)]
    parts = [name for name in names if name != total and last[name] != last.get(total)]
    return [total, *parts] if total in names else names


def _find_scores(lines: Sequence[Line]) -> list[str]:
    """Return the names of an evaluation's metrics, the score first."""
    return list(get_learnt(lines[-1])) if lines else []


def _format(name: str, value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "not finite"
    if name.endswith("_per_s") or abs(value) >= 1000:
        return f"{value:,.0f}" if abs(value) >= 10 else f"{value:.3g}"
    return f"{value:.4g}"


def _draw(values: Sequence[float]) -> str:
    """Draw the curve of the newest values; empty for a single one."""
    newest = [value for value in values if math.isfinite(value)][-_CURVE:]
    return draw_line(newest) if len(newest) > 1 else ""
