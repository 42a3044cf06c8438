"""A run's metrics as lines: reads and rewinds them, and selects what equal runs have in common."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Container, Iterable
from pathlib import Path
from typing import BinaryIO

from store.record.catalogue import EVAL, HEAD, LOOP, LOSS, METRICS, TRAIN, MetricRegistry
from utils.errors import UserError
from utils.json_types import JsonObject, load_json
from utils.storage.local import write_atomically

METRICS_FILE = "metrics.jsonl"
Line = JsonObject
# Prefix of an evaluation's numbers in lines without a kind.
_OLD_EVAL = "eval_"
_OF_LOOP = MetricRegistry(*LOOP)
# A segment's line {"rewind": STEP} has no metrics: the run is rolled back and repeats later steps.
REWIND = "rewind"


def read_metrics(folder: Path, kinds: Container[str] = (TRAIN, EVAL)) -> list[Line]:
    """Read the whole lines of a run's metrics, in today's form; UserError without metrics.

    Lines of epochs are read if `kinds` has them: they repeat what those of training say.
    """
    path = folder / METRICS_FILE
    if not path.is_file():
        raise UserError(f"{path} is not there; give the directory of a run")
    lines = parse_lines(path.read_text(encoding="utf-8", errors="replace"))
    new = (modernise(line) for line in lines if type(line.get("step")) is int)
    return [line for line in new if line["kind"] in kinds]


def write_lines(folder: Path, lines: Iterable[Line]) -> None:
    """Replace a run's metrics by these lines, atomically."""
    write_atomically(folder / METRICS_FILE, "".join(json.dumps(line) + "\n" for line in lines))


def append_line(file: BinaryIO, line: Line) -> None:
    """Append a line to a file open as `ab+`, after ending a torn one, and sync it to the disk."""
    text = json.dumps(line) + "\n"
    size = file.seek(0, os.SEEK_END)
    if size:
        file.seek(size - 1)
        text = text if file.read(1) == b"\n" else "\n" + text
    file.write(text.encode())
    file.flush()
    os.fsync(file.fileno())


def parse_lines(text: str) -> list[Line]:
    """Parse the JSON objects among lines of text; other lines are left out."""
    objects = []
    for line in text.split("\n"):
        with contextlib.suppress(ValueError):
            value = load_json(line)
            if isinstance(value, dict):
                objects.append(value)
    return objects


def keep_until(lines: Iterable[Line], step: int) -> list[Line]:
    """Return the lines that stay valid when a run resumes at a step and evaluates it again."""
    return [
        line
        for line in lines
        if line["step"] < step or (line["step"] == step and line["kind"] != EVAL)
    ]


def replay(lines: Iterable[Line]) -> list[Line]:
    """Return the history of segments, without the lines that a rewind revokes."""
    history: list[Line] = []
    for line in lines:
        if REWIND in line:
            history = keep_until(history, line[REWIND])
        elif type(line.get("step")) is int:
            history.append(modernise(line))
    return history


def modernise(line: Line) -> Line:
    """Return a line in today's form: lines of old runs have no kind and other names.

    They call a part of the loss `kd` and a result `eval_top1`. In today's form these are `loss/kd`
    in a training line and `top1` in an evaluation line.
    """
    if "kind" in line:
        return line
    kind = EVAL if any(name.startswith(_OLD_EVAL) for name in line) else TRAIN

    def rename(name: str) -> str:
        if kind == EVAL:
            return name.removeprefix(_OLD_EVAL)
        return name if name in HEAD or _OF_LOOP.find(name) else LOSS + name

    new = {"step": line["step"], "kind": kind}
    new |= {rename(name): value for name, value in line.items()}
    if isinstance(line.get("nonfinite"), dict):
        new["nonfinite"] = {rename(name): text for name, text in line["nonfinite"].items()}
    return new


def get_numbers(line: Line) -> dict[str, float | None]:
    """Return a line's metrics by name, without its head; None: the number was not finite."""
    return {name: value for name, value in line.items() if name not in HEAD}


def get_learnt(line: Line) -> dict[str, float | None]:
    """Return the task's numbers of a line, without those of the loop and its input (`LOOP`)."""
    return {n: value for n, value in get_numbers(line).items() if _OF_LOOP.find(n) is None}


def get_loss_terms(line: Line) -> dict[str, float | None]:
    """Return the parts of a step's loss by their own names, in the order of the line."""
    return {n.removeprefix(LOSS): value for n, value in line.items() if n.startswith(LOSS)}


def keep_deterministic(line: Line) -> Line:
    """Return the part of a line that is equal in two runs that are equal bit for bit."""
    return {
        name: value
        for name, value in line.items()
        if name != "attempt" and METRICS.is_deterministic(name)
    }
