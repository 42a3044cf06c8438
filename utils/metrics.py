"""Results of evaluations, and the cost of steps and evaluations."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psutil

from utils.endings import GraphBudgetError
from utils.runtime.peaks import find_peak_tflops
from utils.runtime.processes.sequence import count_sequence_parts

if TYPE_CHECKING:
    from utils.runtime.base import Runtime


@dataclass(frozen=True)
class Evaluation:
    """The result of evaluating a model."""

    metrics: dict[str, float]  # as they are logged
    score: float  # higher is better; selects the best checkpoint
    beside: dict[str, float] = field(default_factory=dict)  # metrics of further sets, only logged

    @property
    def all_metrics(self) -> dict[str, float]:
        """Its own metrics and those of further sets."""
        return {**self.metrics, **self.beside}

    @property
    def is_finite(self) -> bool:
        """Whether all own metrics are finite, further averages' included; further sets not."""
        return all(math.isfinite(value) for value in self.metrics.values())

    def describe_fault(self, step: int) -> str:
        """Return the error of an evaluation that is not finite."""
        bad = [name for name, value in self.metrics.items() if not math.isfinite(value)]
        return (
            f"the evaluation after step {step} was not finite ({', '.join(bad)}): the weights "
            "or running statistics hold NaN, or the outputs overflow; lower optim.lr, or check "
            "runtime.precision"
        )


class LoopMeter:
    """Measures time, graphs, host reads and input waits of steps and evaluations.

    `unit` names the throughput (`img` gives `img_per_s`); `flops_per_unit` gives `mfu`, if the
    device's peak is known. Raises a GraphBudgetError in the phase that exceeds the budget.
    """

    def __init__(
        self,
        runtime: Runtime,
        graph_budget: int,
        steps_per_epoch: int,
        unit: str,
        *,
        flops_per_unit: float | None = None,
    ) -> None:
        self._runtime, self._unit = runtime, unit
        self._flops_per_unit = flops_per_unit or 0.0
        self._peak_tflops = find_peak_tflops(runtime) if flops_per_unit else None
        self._budget = graph_budget
        self._steps_per_epoch = steps_per_epoch
        self._start = self._window = time.perf_counter()
        self._seen = runtime.counters()
        self._graphs = {"setup": self._seen["graphs"], "train": 0, "eval": 0}
        self._units = 0
        self._wait_s, self._reads, self._outside_s = 0.0, 0, 0.0

    def end_setup(self) -> None:
        self._note("setup", 0)

    def end_step(self, step: int, units: int, wait_s: float) -> None:
        """Count one optimizer step with its units of data and its wait for input."""
        self._units += units
        self._wait_s += wait_s
        self._reads += self._note("train", step)

    @contextlib.contextmanager
    def phase(self, name: str, step: int) -> Iterator[None]:
        """Measure an evaluation apart from steps."""
        start = time.perf_counter()
        yield
        self._note(name, step)
        self._outside_s += time.perf_counter() - start

    def take(self, step: int) -> dict[str, float]:
        """Return the numbers of one log line, since the last call."""
        now = time.perf_counter()
        elapsed = max(now - self._window - self._outside_s, 1e-9)
        mfu: dict[str, float] = {}
        if self._peak_tflops is not None:
            devices = self._runtime.device_count * count_sequence_parts()
            peak = self._peak_tflops * 1e12 * devices
            mfu = {"mfu": self._units * self._flops_per_unit / elapsed / peak}
        facts = {
            **mfu,
            "epoch": step / self._steps_per_epoch,
            "time_s": now - self._start,
            f"{self._unit}_per_s": self._units / elapsed,
            "input_wait_s": self._wait_s,
            "host_reads": self._reads,
            "host_rss_gib": psutil.Process().memory_info().rss / 2**30,
            **self.get_graphs(),
            **self._runtime.instruments.read_device(),
        }
        self._window = now
        self._units = 0
        self._wait_s, self._reads, self._outside_s = 0.0, 0, 0.0
        return facts

    def get_graphs(self) -> dict[str, int]:
        """Return the graphs compiled so far: all, by training steps, by evaluations."""
        return {
            "graphs": sum(self._graphs.values()),
            "graphs_train": self._graphs["train"],
            "graphs_eval": self._graphs["eval"],
        }

    def _note(self, phase: str, step: int) -> int:
        """Book new graphs to a phase; return the undeclared host reads."""
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
