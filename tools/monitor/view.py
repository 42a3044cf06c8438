"""A run's newest numbers as a table, and its end as a line."""

from __future__ import annotations

import json
import math
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import psutil
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from store.formatting import draw_line
from store.query.record import RunRecord
from store.record.catalogue import EVAL, LOSS, METRICS, TRAIN
from store.record.claim import is_of_this_machine, is_running
from store.record.history import METRICS_FILE, Line, get_learnt
from store.record.lock import LOCK_FILE
from store.terminal import colour_word
from utils.device_use import DeviceUse
from utils.json_types import JsonObject
from utils.storage.folder import StorageError
from utils.storage.places import is_remote, to_path

NOT_THERE = "not there"
# Newest values that the course of a number is drawn from.
_COURSE = 24
_SHOWN_DEVICES = 8
# How an attempt's end begins; people want what follows.
_ERROR = re.compile(r"^\w+: ")


@dataclass(frozen=True)
class Row:
    """One number: now, before that, at its best, and how it has moved."""

    name: str
    now: str
    before: str = ""
    best: str = ""
    course: str = ""


def create_view(record: RunRecord, devices: Sequence[DeviceUse] | None, now: float) -> Group:
    """All that a person looks for while a run trains.

    Args:
      devices: of the run's machine; none: it is not this one.
      now: seconds since 1970.
    """
    title = Text.assemble("  ", (record.path, "bold"), "  ", *_describe_status(record))
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("", "now", "before", "best", "course"):
        table.add_column(name, justify="left" if name in ("", "course") else "right")
    for row in (*_list_numbers(record), *_list_machine(record, devices)):
        table.add_row(row.name, row.now, row.before, row.best, row.course)
    return Group(title, table, Text(f"  {_describe_progress(record, now)}"))


def describe_end(record: RunRecord) -> str:
    """A complete run in one line."""
    reason = record.facts.get("reason") or "it has done all its steps"
    score = next(iter(_find_scores(record)), None)
    found = "" if score is None else f"; {score} at its end {_format(score, _final(record, score))}"
    return f"{record.path} is complete: {reason}{found}"


def is_here(record: RunRecord) -> bool:
    """Whether the run's newest program works, or worked, on this machine."""
    return bool(record.attempts) and record.attempts[-1].get("host") == socket.gethostname()


def _describe_status(record: RunRecord) -> list[str | Text | tuple[str, str]]:
    status = str(record.facts.get("status", "not begun"))
    attempt = record.attempts[-1] if record.attempts else {}
    words: list[str | Text | tuple[str, str]] = []
    if status == "running" and _is_dead(record):
        words.append(("running no more: its program is gone, --resume auto goes on", "red"))
    else:
        words.append(colour_word(status))
    if status != "running" and record.facts.get("reason"):
        words.append(f": {_ERROR.sub('', str(record.facts['reason']))}")
    if attempt:
        hardware = attempt.get("hardware") or {}
        kind = hardware.get("device_kind") or hardware.get("device") or "?"
        words.append(f"  attempt {attempt['attempt']} on {attempt.get('host', '?')} ({kind})")
    return words


def _is_dead(record: RunRecord) -> bool:
    """Whether the program that says it runs is one of this machine that is there no more."""
    try:
        owner = json.loads(record.folder.read_texts([LOCK_FILE]).get(LOCK_FILE) or "{}")
    except (ValueError, StorageError):
        return False
    return isinstance(owner, dict) and is_of_this_machine(owner) and not is_running(owner)


def _describe_progress(record: RunRecord, now: float) -> str:
    lines = _find_lines(record, TRAIN)
    if not lines:
        return "no step has been logged yet"
    step, total = lines[-1]["step"], _count_steps(record, lines[-1])
    parts = [f"step {step:,}" if total is None else f"step {step:,} of {total:,}"]
    if lines[-1].get("epoch") is not None:
        parts.append(f"epoch {lines[-1]['epoch']:.2f}")
    pace = _get_pace(lines)
    if total is not None and pace and record.facts.get("status") == "running":
        parts.append(f"about {_format_time((total - step) * pace)} of steps left")
    if not is_remote(str(record.folder)):
        path = to_path(str(record.folder)) / METRICS_FILE
        parts.append(f"newest line {_format_time(max(0.0, now - path.stat().st_mtime))} ago")
    return ", ".join(parts)


def _count_steps(record: RunRecord, line: Line) -> int | None:
    """Steps of the whole run, from its configuration and what one line tells of an epoch."""
    steps, epochs = record.config.get("train.steps"), record.config.get("train.epochs")
    if isinstance(steps, int):
        return steps
    if isinstance(epochs, int) and line.get("epoch"):
        return round(line["step"] / line["epoch"] * epochs)
    return None


def _get_pace(lines: Sequence[Line]) -> float | None:
    """Seconds a step between the newest two lines."""
    if len(lines) < 2:
        return None
    before, last = lines[-2:]
    steps = last["step"] - before["step"]
    seconds = (last.get("time_s") or 0.0) - (before.get("time_s") or 0.0)
    return seconds / steps if steps > 0 and seconds > 0 else None


def _list_numbers(record: RunRecord) -> list[Row]:
    """What is learnt, and how fast."""
    train, found = _find_lines(record, TRAIN), _find_lines(record, EVAL)
    rows = [_create_row(name, train) for name in _find_terms(train)]
    rows = rows or [Row("loss", "not logged yet")]
    scores = _find_scores(record)[:1]
    rows += [_create_row(name, found) for name in scores] or [Row("score", "not evaluated yet")]
    rows += [_create_row(name, train) for name in _find_names(train, "_per_s")]
    rows += [_create_row("lr", train)] if train and "lr" in train[-1] else []
    return [*rows, _create_wait_row(train)]


def _create_wait_row(lines: Sequence[Line]) -> Row:
    """The share of the time in which steps waited for their batch."""
    shares = []
    for before, line in pairwise([{}, *lines]):
        seconds = (line.get("time_s") or 0.0) - (before.get("time_s") or 0.0)
        if seconds > 0 and line.get("input_wait_s") is not None:
            shares.append(100 * min(1.0, line["input_wait_s"] / seconds))
    if not shares:
        return Row("input wait", NOT_THERE)
    texts = [f"{share:.1f} %" for share in shares]
    return Row("input wait", texts[-1], texts[-2] if len(texts) > 1 else "", min(texts, key=_first),
               _draw(shares))  # fmt: skip


def _list_machine(record: RunRecord, devices: Sequence[DeviceUse] | None) -> list[Row]:
    lines = _find_lines(record, TRAIN)
    resident = lines[-1].get("host_rss_gib") if lines else None
    memory = NOT_THERE if resident is None else f"{resident:.2f} GiB"
    known = [line["host_rss_gib"] for line in lines if line.get("host_rss_gib") is not None]
    rows = [Row("host memory, rank 0", memory, course=_draw(known))]
    if devices is not None:
        of_host = psutil.virtual_memory()
        used, total = (of_host.total - of_host.available) / 2**30, of_host.total / 2**30
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
    metric = METRICS.find(name)
    best = ""
    if finite and metric is not None and metric.direction != "none":
        best = _format(name, (min if metric.direction == "lower" else max)(finite))
    before = _format(name, values[-2]) if len(values) > 1 else ""
    return Row(_describe(name), _format(name, values[-1]), before, best, _draw(finite))


def _find_lines(record: RunRecord, kind: str) -> list[Line]:
    return [line for line in record.lines if line["kind"] == kind]


def _find_names(lines: Sequence[Line], part: str) -> list[str]:
    """Names in the newest line that begin or end with something."""
    names = lines[-1] if lines else {}
    return [name for name in names if name.startswith(part) or name.endswith(part)]


def _find_terms(lines: Sequence[Line]) -> list[str]:
    """The whole loss, then its parts; a part that is all of it says nothing more."""
    total, names = f"{LOSS}total", _find_names(lines, LOSS)
    parts = [one for one in names if one != total and lines[-1][one] != lines[-1].get(total)]
    return [total, *parts] if total in names else names


def _find_scores(record: RunRecord) -> list[str]:
    """What evaluations tell, their verdict first."""
    lines = _find_lines(record, EVAL)
    return list(get_learnt(lines[-1])) if lines else []


def _final(record: RunRecord, name: str) -> float | None:
    final: JsonObject = record.facts.get("final") or {}
    return final.get(f"eval_{name}", _find_lines(record, EVAL)[-1].get(name))


def _describe(name: str) -> str:
    metric = METRICS.find(name)
    return f"{name} ({metric.unit})" if metric and metric.unit not in ("", "1/s") else name


def _format(name: str, value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "not finite"
    if name.endswith("_per_s") or abs(value) >= 1000:
        return f"{value:,.0f}" if abs(value) >= 10 else f"{value:.3g}"
    return f"{value:.4g}"


def _format_time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def _first(text: str) -> float:
    return float(text.split()[0])


def _draw(values: Sequence[float]) -> str:
    """The course of the newest values; of a single one there is none."""
    newest = [value for value in values if math.isfinite(value)][-_COURSE:]
    return draw_line(newest) if len(newest) > 1 else ""
