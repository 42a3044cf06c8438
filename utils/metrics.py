"""What a run measures of itself, and the one file that it writes it to."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from utils.errors import UserError
from utils.storage import write_atomically

if TYPE_CHECKING:
    from utils.runtime.base import Runtime

METRICS_FILE = "metrics.jsonl"


class GraphBudgetError(RuntimeError):
    """The run compiled more graphs than `runtime.graph_budget` allows."""


class LostRunError(RuntimeError):
    """What the run has written is gone."""


class LoopMeter:
    """Counts what steps and evaluations cost: time, graphs, host reads, waiting for input.

    Raises:
      GraphBudgetError: as soon as a step or an evaluation exceeds the budget; names it.
    """

    def __init__(self, runtime: Runtime, graph_budget: int, steps_per_epoch: int) -> None:
        self._runtime = runtime
        self._budget = graph_budget
        self._steps_per_epoch = steps_per_epoch
        self._start = self._window = time.perf_counter()
        self._seen = runtime.counters()
        self._graphs = {"setup": self._seen["graphs"], "train": 0, "eval": 0}
        self._images = self._steps = 0
        self._wait_s = self._reads = self._outside_s = 0

    def end_step(self, step: int, images: int, wait_s: float) -> None:
        """Take one optimizer step into account."""
        self._images += images
        self._steps += 1
        self._wait_s += wait_s
        self._reads += self._note("train", step)

    @contextlib.contextmanager
    def phase(self, name: str, step: int) -> Iterator[None]:
        """Around an evaluation: its time and graphs are not the steps'."""
        start = time.perf_counter()
        yield
        self._note(name, step)
        self._outside_s += time.perf_counter() - start

    def take(self, step: int) -> dict[str, float]:
        """Facts of the window since the last call: one log line's worth."""
        now = time.perf_counter()
        elapsed = max(now - self._window - self._outside_s, 1e-9)
        facts = {
            "epoch": step / self._steps_per_epoch,
            "time_s": now - self._start,
            "img_per_s": self._images / elapsed,
            "input_wait_s": self._wait_s,
            "host_reads": self._reads,
            "host_rss_gib": psutil.Process().memory_info().rss / 2**30,
            **self.get_graphs(),
        }
        self._window = now
        self._images = self._steps = 0
        self._wait_s = self._reads = self._outside_s = 0
        return facts

    def get_graphs(self) -> dict[str, int]:
        """Graphs compiled so far: all, by training steps, by evaluations."""
        return {
            "graphs": sum(self._graphs.values()),
            "graphs_train": self._graphs["train"],
            "graphs_eval": self._graphs["eval"],
        }

    def _note(self, phase: str, step: int) -> int:
        """Book what the counters gained to a phase; gives the undeclared host reads."""
        now = self._runtime.counters()
        new_graphs = now["graphs"] - self._seen["graphs"]
        reads = now["host_reads"] - self._seen["host_reads"]
        self._seen = now
        self._graphs[phase] += new_graphs
        total = sum(self._graphs.values())
        if new_graphs and total > self._budget:
            raise GraphBudgetError(
                f"{phase} of step {step} compiled graph {total} of this run, which exceeds "
                f"runtime.graph_budget ({self._budget}); a shape or a Python number changes from "
                "step to step, or the budget is too low"
            )
        return reads


class MetricWriter:
    """Appends one JSON line for each log point; on rank zero only.

    Args:
      folder: the run's directory.
      first_step: of a resumed run: later lines in the file are dropped, and so is an evaluation
        at this very step, which is made again.
    """

    def __init__(self, folder: Path, *, first_step: int = 0, tensorboard: bool = False) -> None:
        self.path = folder / METRICS_FILE
        _drop_lines_after(self.path, first_step)
        self._file = self.path.open("a", encoding="utf-8")
        self._events: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(folder), purge_step=first_step or None)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """One line: the step and its scalars; numbers that are not finite become null."""
        line = {"step": step}
        for name, value in scalars.items():
            line[name] = value if math.isfinite(value) else None
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if os.fstat(self._file.fileno()).st_nlink == 0:
            raise LostRunError(
                f"{self.path} was deleted while the run was writing it; restore the directory from "
                "a copy, or begin the run again"
            )
        if self._events is not None:
            for name, value in scalars.items():
                self._events.add_scalar(name, value, step)

    def sync(self) -> None:
        """Have all lines so far on the disk: before a checkpoint that counts on them."""
        os.fsync(self._file.fileno())

    def rewind(self, step: int) -> None:
        """Drop the lines after a step, which the run does again."""
        self._file.close()
        _drop_lines_after(self.path, step)
        self._file = self.path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Flush and close the files."""
        self._file.close()
        if self._events is not None:
            self._events.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """All whole lines of a run's metrics; torn or damaged ones are left out."""
    path = folder / METRICS_FILE
    if not path.is_file():
        raise UserError(f"{path} is not there; give the directory of a run")
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        with contextlib.suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and type(line.get("step")) is int:
                lines.append(line)
    return lines


def _drop_lines_after(path: Path, step: int) -> None:
    if not path.is_file():
        return
    kept = []
    for line in read_metrics(path.parent):
        is_redone = line["step"] == step and "eval_top1" in line
        if line["step"] <= step and not is_redone:
            kept.append(line)
    write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))
