"""A run's metrics as lines: reading them, going back in them, and which of them are clocks."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from utils.errors import UserError
from utils.storage import write_atomically

METRICS_FILE = "metrics.jsonl"
Line = dict[str, Any]
# What differs between two runs that are equal bit for bit.
CLOCKS = frozenset({
    "time_s", "img_per_s", "input_wait_s", "host_rss_gib", "graphs", "graphs_train", "graphs_eval",
    "checkpoint_held_s", "attempt",
})  # fmt: skip
# A line of a segment that is no metrics: what came after this step is done again.
REWIND = "rewind"


def read_metrics(folder: Path) -> list[Line]:
    """All whole lines of a run's metrics; torn or damaged ones are left out.

    Raises:
      UserError: the directory holds no metrics.
    """
    path = folder / METRICS_FILE
    if not path.is_file():
        raise UserError(f"{path} is not there; give the directory of a run")
    lines = parse_lines(path.read_text(encoding="utf-8", errors="replace"))
    return [line for line in lines if type(line.get("step")) is int]


def write_lines(folder: Path, lines: Iterable[Line]) -> None:
    """Put lines in the place of a run's metrics, all of them or nothing."""
    write_atomically(folder / METRICS_FILE, "".join(json.dumps(line) + "\n" for line in lines))


def parse_lines(text: str) -> list[Line]:
    """The JSON objects among lines of text."""
    found = []
    for line in text.split("\n"):
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict):
                found.append(value)
    return found


def keep_until(lines: Iterable[Line], step: int) -> list[Line]:
    """The lines that stand when a run goes on from a step; its evaluation there is made again."""
    return [
        line for line in lines
        if line["step"] < step or (line["step"] == step and not is_evaluation(line))
    ]  # fmt: skip


def replay(lines: Iterable[Line]) -> list[Line]:
    """The history that segments tell: each rewind takes back what was done again after it."""
    history: list[Line] = []
    for line in lines:
        if REWIND in line:
            history = keep_until(history, line[REWIND])
        elif type(line.get("step")) is int:
            history.append(line)
    return history


def is_evaluation(line: Line) -> bool:
    """Whether a line is of an evaluation, not of training steps."""
    return any(name.startswith("eval_") for name in line)
