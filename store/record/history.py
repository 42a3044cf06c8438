"""A run's metrics as lines: reading them, going back in them, what of them equal runs share."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from store.record.catalogue import EVAL, HEAD, LOOP, LOSS, METRICS, TRAIN, Catalogue
from utils.errors import UserError
from utils.json_types import JsonObject, load_json
from utils.storage.local import write_atomically

METRICS_FILE = "metrics.jsonl"
Line = JsonObject
# What lines without a kind called the numbers of an evaluation.
_OLD_EVAL = "eval_"
_OF_LOOP = Catalogue(*LOOP)
# A line of a segment that is no metrics: what came after this step is done again.
REWIND = "rewind"


def read_metrics(folder: Path) -> list[Line]:
    """All whole lines of a run's metrics; torn or damaged ones are left out.

    Lines of runs from before lines had a kind come in today's form.

    Raises:
      UserError: the directory holds no metrics.
    """
    path = folder / METRICS_FILE
    if not path.is_file():
        raise UserError(f"{path} is not there; give the directory of a run")
    lines = parse_lines(path.read_text(encoding="utf-8", errors="replace"))
    return [modernise(line) for line in lines if type(line.get("step")) is int]


def write_lines(folder: Path, lines: Iterable[Line]) -> None:
    """Put lines in the place of a run's metrics, all of them or nothing."""
    write_atomically(folder / METRICS_FILE, "".join(json.dumps(line) + "\n" for line in lines))


def append_line(file: BinaryIO, line: Line) -> None:
    """Put a line at the end of a file of lines, and have it on the disk.

    A line there that a kill has torn does not swallow the new one.

    Args:
      file: open as `ab+`.
    """
    text = json.dumps(line) + "\n"
    size = file.seek(0, os.SEEK_END)
    if size:
        file.seek(size - 1)
        text = text if file.read(1) == b"\n" else "\n" + text
    file.write(text.encode())
    file.flush()
    os.fsync(file.fileno())


def parse_lines(text: str) -> list[Line]:
    """The JSON objects among lines of text."""
    found = []
    for line in text.split("\n"):
        with contextlib.suppress(ValueError):
            value = load_json(line)
            if isinstance(value, dict):
                found.append(value)
    return found


def keep_until(lines: Iterable[Line], step: int) -> list[Line]:
    """The lines that stand when a run goes on from a step; its evaluation there is made again."""
    return [
        line for line in lines
        if line["step"] < step or (line["step"] == step and line["kind"] == TRAIN)
    ]  # fmt: skip


def replay(lines: Iterable[Line]) -> list[Line]:
    """The history that segments tell: each rewind takes back what was done again after it."""
    history: list[Line] = []
    for line in lines:
        if REWIND in line:
            history = keep_until(history, line[REWIND])
        elif type(line.get("step")) is int:
            history.append(modernise(line))
    return history


def modernise(line: Line) -> Line:
    """A line with its kind; where it had none, its numbers get the names that they have today.

    Such a line called a part of the loss `kd` and a verdict `eval_top1`; they are `loss/kd` in a
    line of training and `top1` in one of evaluation.
    """
    if "kind" in line:
        return line
    kind = EVAL if any(name.startswith(_OLD_EVAL) for name in line) else TRAIN

    def rename(name: str) -> str:
        if kind == EVAL:
            return name.removeprefix(_OLD_EVAL)
        return name if name in HEAD or _OF_LOOP.find(name) else LOSS + name

    found = {"step": line["step"], "kind": kind}
    found |= {rename(name): value for name, value in line.items()}
    if isinstance(line.get("nonfinite"), dict):
        found["nonfinite"] = {rename(name): text for name, text in line["nonfinite"].items()}
    return found


def get_numbers(line: Line) -> dict[str, float | None]:
    """A line's metrics by name, without its head; none: the number was not finite."""
    return {name: value for name, value in line.items() if name not in HEAD}


def get_learnt(line: Line) -> dict[str, float | None]:
    """The numbers of a line that tell of what is learnt, not of the loop and its input."""
    return {n: value for n, value in get_numbers(line).items() if _OF_LOOP.find(n) is None}


def get_loss_terms(line: Line) -> dict[str, float | None]:
    """The parts of a step's loss by their own names, in the order of the line."""
    found = ((name, value) for name, value in line.items() if name.startswith(LOSS))
    return {name.removeprefix(LOSS): value for name, value in found}


def keep_deterministic(line: Line) -> Line:
    """What two runs that are equal bit for bit have in common at a line."""
    return {
        name: value for name, value in line.items()
        if name != "attempt" and METRICS.is_deterministic(name)
    }  # fmt: skip
