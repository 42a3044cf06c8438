"""Measures the engine's own steps on one replica.

A block of steps lies between two moments at which the device has finished all that it was given,
so nothing is left out of a block's time: input, step, log points, dispatch.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bill.step.synthetic_run import describe_example
from engine import run_steps
from job.build import build_parts
from job.stream import iterate_batches
from proofs.benchmark.bare import BareLoop
from proofs.benchmark.gauges import create_gauge
from proofs.benchmark.report import get_rate_name
from tasks.protocol import Traceable
from tasks.teachers.taught import count_flops
from utils.json_types import JsonObject
from utils.log import setup_logging
from utils.metrics import LoopMeter
from utils.runtime.peaks import find_peak_tflops, name_hardware
from utils.runtime.processes.sequence import count_sequence_parts

if TYPE_CHECKING:
    from torch import Tensor

    from datasets import Batch
    from engine import StepResult
    from job.build import Parts
    from job.spec import Job
    from proofs.benchmark.bare import BareLoop
    from utils.runtime.base import Runtime

MAX_WARMUP_STEPS = 200  # beyond those asked for, before graphs count as unstable
_QUIET_STEPS = 3  # without a new graph, before graphs count as stable
_PREPARED_BATCHES = 2  # of synthetic input, used in turns


class UnstableGraphsError(RuntimeError):
    """The run goes on compiling."""


@dataclass(frozen=True)
class Pace:
    """Numbers of steps and blocks to measure.

    Args:
      steps: of one block.
      repeats: blocks.
      warmup_steps: least number of steps before the first block.
      synthetic: batches are made beforehand and used over and over.
      bare: blocks of a bare loop take turns with the engine's.
    """

    steps: int
    repeats: int
    warmup_steps: int
    synthetic: bool
    bare: bool


@dataclass
class Block:
    """Times of one block of steps on one rank.

    Args:
      wall_s, cpu_s: by the clock, and of the process's CPU time.
      wait_s: of it, waiting for input.
      step_s: each step's share.
      bare: wall and CPU seconds of the bare loop's block before it.
    """

    wall_s: float
    cpu_s: float
    wait_s: float
    step_s: list[float]
    bare: tuple[float, float] | None = None


@dataclass
class Record:
    """Measurements of one rank."""

    warmup_s: list[float] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    graphs: int = 0
    graphs_measured: int = 0
    host_reads_measured: int = 0
    compile_s: float = 0.0
    host_rss_gib: float = 0.0
    device_gib: float | None = None


def measure(runtime: Runtime, job: Job, pace: Pace, path: str) -> None:
    """Measure on one replica: build the run's parts, run the engine, write figures on rank zero."""
    setup_logging(runtime.ranks.index, runtime.ranks.size)
    # What this process has compiled until here is not the run's.
    before = create_gauge(runtime).count_compiles()
    parts = build_parts(runtime, job)
    try:
        batches: Callable[[int], Iterable[Batch]] = partial(iterate_batches, parts)
        bare = None
        if pace.synthetic:
            prepared = list(itertools.islice(batches(0), _PREPARED_BATCHES))
            batches = partial(_repeat, prepared)
            bare = _warm_bare_loop(runtime, job, parts, prepared) if pace.bare else None
        recorder = Recorder(runtime, pace, bare)
        recorder.exclude(before)
        run_engine(runtime, parts, recorder, batches)
        records = runtime.ranks.gather(recorder.finish())
    finally:
        parts.close()
    if runtime.ranks.is_writer:
        facts = describe(runtime, job, parts, pace)
        result = {**facts, **summarise(records, facts)}
        report = {"environment": runtime.describe(), "result": result}
        Path(path).write_text(json.dumps(report), encoding="utf-8")


def run_engine(
    runtime: Runtime, parts: Parts, recorder: Recorder, batches: Callable[[int], Iterable[Batch]]
) -> None:
    """Run the engine's steps and log points, without evaluations and checkpoints."""
    state, plan = parts.state, parts.plan
    task = runtime.prepare_task(parts.task, state.model, state.loss_modules)
    steps = run_steps(state, batches(state.step), task, runtime, plan)
    budget = plan.graph_budget + recorder.foreign_graphs
    unit, per_example = task.unit
    meter = LoopMeter(runtime, budget, plan.steps_per_epoch, unit)
    recorder.begin(state.step)
    with contextlib.closing(steps):
        for result in steps:
            meter.end_step(result.step, plan.global_batch_size * per_example, result.wait_s)
            # As in the trainer: the read of a log point comes a step later.
            runtime.flush_deferred()
            if result.step % plan.log_every == 0:
                meter.take(result.step)
                assert result.values is not None
                runtime.defer(_drop, scalars=result.values)
            if recorder.end_step(result):
                break


def _drop(values: Tensor) -> None:
    """Take the place of a log line: the read alone counts."""


class Recorder:
    """Called after each step: waits for stable graphs, then times blocks of steps.

    Attributes:
      foreign_graphs: that the bare loop has compiled, and the run's budget does not count.
    """

    def __init__(self, runtime: Runtime, pace: Pace, bare: BareLoop | None = None) -> None:
        self._runtime, self._pace, self._bare = runtime, pace, bare
        self._record = Record()
        self._gauge = create_gauge(runtime)
        self._clock = self._gauge.create_clock()
        self._last_result: StepResult | None = None
        self.foreign_graphs = 0
        self._counted = (0, 0.0)
        self._seen_graphs, self._quiet = -1, 0
        self._last = time.perf_counter()
        self._is_measuring = False
        self._at_start: tuple[int, int] = (0, 0)
        self._bare_times: tuple[float, float] | None = None
        self._wait_s = 0.0

    def exclude(self, before: tuple[int, float]) -> None:
        """Leave out graphs and compile seconds of before, and those of the bare loop."""
        self._counted = before
        if self._bare is not None:
            graphs, seconds = self._bare.compiled
            self._counted = (before[0] + graphs, before[1] + seconds)
            self.foreign_graphs = graphs

    def begin(self, step: int) -> None:
        """Begin: the first step comes next."""
        self._warm_up(step)

    def end_step(self, result: StepResult) -> bool:
        """Note a dispatched step; return whether all is measured."""
        self._last_result = result
        if not self._is_measuring:
            self._warm_up(result.step)
            return False
        self._wait_s += result.wait_s
        if len(self._clock) < self._pace.steps:
            self._clock.stamp()
            return False
        self._end_block()
        return self._start_block()

    def finish(self) -> Record:
        """Return the record, completed."""
        record = self._record
        # torch.compile has no count of its own: what warm-up steps took beyond a usual step.
        if self._runtime.section.compile:
            usual = np.median([s for block in record.blocks for s in block.step_s])
            record.compile_s = float(sum(max(0.0, s - usual) for s in record.warmup_s))
        return record

    def _warm_up(self, step: int) -> None:
        """Continue until some steps have brought no rank a new graph."""
        now = time.perf_counter()
        if step:
            self._record.warmup_s.append(now - self._last)
        graphs = self._gauge.count_compiles()[0]
        # On all ranks alike: a rank that went on alone would wait for the others for ever.
        has_news = self._runtime.ranks.any(graphs != self._seen_graphs)
        self._quiet = 0 if has_news else self._quiet + 1
        self._seen_graphs = graphs
        if len(self._record.warmup_s) >= self._pace.warmup_steps and self._quiet >= _QUIET_STEPS:
            self._is_measuring = True
            self._wait_for_device()
            self._at_start = (graphs, self._runtime.counters()["host_reads"])
            self._start_block()
        elif step >= self._pace.warmup_steps + MAX_WARMUP_STEPS:
            raise UnstableGraphsError(
                f"graphs are not stable after {step} steps: {graphs} so far; a shape or a Python "
                "number changes from step to step"
            )
        self._last = time.perf_counter()

    def _start_block(self) -> bool:
        """Start the clock of the next block; return True if all blocks are measured."""
        if len(self._record.blocks) == self._pace.repeats:
            self._close()
            return True
        if self._bare is not None:
            # Just before the engine's block, so that the machine is the same for both.
            self._bare_times = self._bare.run(self._pace.steps)
        # Only before the first block: later ones follow the block before them.
        if not self._record.blocks:
            self._runtime.ranks.barrier("start of the measurement")
        self._wait_s = 0.0
        self._cpu_began = time.process_time()
        self._began = time.perf_counter()
        self._clock.start()
        return False

    def _end_block(self) -> None:
        self._wait_for_device()
        wall = time.perf_counter() - self._began
        cpu = time.process_time() - self._cpu_began
        # A step is dispatched before it is done, so the device was waited for above.
        block = Block(wall, cpu, self._wait_s, self._clock.take(), self._bare_times)
        self._record.blocks.append(block)

    def _close(self) -> None:
        """Record compiled graphs, host reads and peak memory."""
        record, runtime = self._record, self._runtime
        # Less what was there before, and the bare loop's: see `exclude`.
        graphs, seconds = self._gauge.count_compiles()
        record.graphs = graphs - self._counted[0]
        record.compile_s = seconds - self._counted[1]
        record.graphs_measured = graphs - self._at_start[0]
        record.host_reads_measured = runtime.counters()["host_reads"] - self._at_start[1]
        record.host_rss_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        record.device_gib = self._gauge.get_peak_gib()

    def _wait_for_device(self) -> None:
        """Wait for the last step, by reading a number of it."""
        if self._last_result is not None:
            assert self._last_result.values is not None
            self._runtime.fetch(self._last_result.values)  # host read: ends of blocks


def _repeat(batches: list[Batch], first_step: int) -> Iterator[Batch]:
    return itertools.cycle(batches)


def _warm_bare_loop(runtime: Runtime, job: Job, parts: Parts, batches: list[Batch]) -> BareLoop:
    """Create the bare loop with its graphs compiled; `compiled` has their number and seconds."""
    gauge = create_gauge(runtime)
    before = gauge.count_compiles()
    bare = BareLoop(runtime, job, parts, batches)
    bare.run(_QUIET_STEPS + 1)
    after = gauge.count_compiles()
    bare.compiled = (after[0] - before[0], after[1] - before[1])
    return bare


def describe(runtime: Runtime, job: Job, parts: Parts, pace: Pace) -> JsonObject:
    """Describe what was measured, and count its FLOPs."""
    hardware = name_hardware(runtime.describe().get("hardware", ""))
    assert isinstance(parts.task, Traceable)
    return {
        "processes": runtime.ranks.size,
        "devices": runtime.device_count * count_sequence_parts(),
        "hardware": hardware,
        "global_batch_size": job.config.data.global_batch_size,
        "steps": pace.steps,
        "repeats": pace.repeats,
        "unit": parts.task.unit[0],
        "units_per_example": parts.task.unit[1],
        "example": describe_example(parts.train_loader),
        "parameters": parts.count_parameters(),
        "flops_per_example": count_flops(job.config, job.facts, parts.task),
        "peak_tflops": find_peak_tflops(runtime),
    }


def summarise(records: list[Record], facts: JsonObject) -> JsonObject:
    """Compute the figures of a measurement from the records of all ranks.

    A block is as long as on its slowest rank; waiting is a mean over ranks, memory the largest
    rank's, graphs and reads the most of a rank.
    """
    first = records[0]
    # A step ends on all ranks together, so a block is as long as on the slowest.
    per_rank = [[block.wall_s for block in record.blocks] for record in records]
    walls = [max(times) for times in zip(*per_rank, strict=True)]
    examples = facts["global_batch_size"] * facts["steps"]
    rates = [examples * facts["units_per_example"] / wall for wall in walls]
    rate = float(np.median(rates))
    waits = [sum(b.wait_s for b in r.blocks) for r in records]
    steps_s = [seconds for block in first.blocks for seconds in block.step_s]
    device_gib = [r.device_gib for r in records if r.device_gib is not None]
    # MFU: model FLOPs of a second over the peak of all devices.
    flops, peak = facts["flops_per_example"], facts["peak_tflops"]
    mfu = None
    if flops is not None and peak is not None:
        flops_per_unit = flops["total"] / facts["units_per_example"]
        mfu = rate * flops_per_unit / (peak * 1e12 * facts["devices"])
    name = get_rate_name(facts)
    figures = {
        name: rate,
        f"{name}_repeats": rates,
        "step_p50_s": float(np.percentile(steps_s, 50)),
        "step_p95_s": float(np.percentile(steps_s, 95)),
        "input_stall_share": float(np.mean(waits)) / sum(walls),
        "warmup_steps": len(first.warmup_s),
        "graphs": max(r.graphs for r in records),
        "graphs_measured": max(r.graphs_measured for r in records),
        "host_reads_measured": max(r.host_reads_measured for r in records),
        "compile_s": max(r.compile_s for r in records),
        "peak_host_gib": max(r.host_rss_gib for r in records),
        "peak_device_gib": max(device_gib, default=None),
        "mfu": mfu,
    }
    return {**figures, **_compare_with_bare(first.blocks)}


def _compare_with_bare(blocks: list[Block]) -> JsonObject:
    """Engine over bare loop: medians of pairs by the clock and of CPU time; fastest blocks."""
    bare = [block.bare for block in blocks if block.bare is not None]
    if not bare:
        return {}
    steps = len(blocks[0].step_s)
    # Each block is compared with the bare one just before it, so drift of the machine cancels.
    ratios = [block.wall_s / wall_s for block, (wall_s, _) in zip(blocks, bare, strict=True)]
    fastest = min(block.wall_s for block in blocks) / min(wall_s for wall_s, _ in bare)
    cpu_ratios = [block.cpu_s / cpu_s for block, (_, cpu_s) in zip(blocks, bare, strict=True)]
    return {
        "bare_step_s": float(np.median([wall_s for wall_s, _ in bare])) / steps,
        "engine_over_bare": float(np.median(ratios)),
        "engine_over_bare_repeats": ratios,
        "engine_over_bare_fastest": fastest,
        "engine_over_bare_cpu": float(np.median(cpu_ratios)),
    }
