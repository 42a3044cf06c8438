"""Measures what a checkpoint costs the loop.

    python -m proofs.benchmark_checkpoint --config configs/x.yaml [flags of main.py]

Times windows of real training steps, with and without one checkpoint that is taken, written, read
back and verified in them. Prints the share of the loop's time at one checkpoint a minute, as the
windows show it, and at most: the copy to the host, for which the loop is held, and all CPU time of
the writing thread, as if no core were free. The second one hardly depends on other work on the
machine and decides the exit code. Further flags go to main.py's configuration. Nothing is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from engine import run_steps
from proofs.timed_run import load_timed_config, open_run
from store.record.environment import read_environment
from utils.json_types import JsonObject
from utils.programs import CommandLine, create_program_parser
from utils.storage.json_files import write_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine import StepResult
    from job.callbacks import RunCallbacks
    from utils.config.load import RunConfig
    from utils.runtime.base import Runtime

_MIB = 1 << 20
_WARM_UP = 5
# A window is so many times as long as a write, which must end within it.
_ROOM = 4.0


def run(options: argparse.Namespace) -> int:
    """Measure in a temporary directory, and report; return 1 if the share exceeds --limit."""
    with tempfile.TemporaryDirectory(prefix="checkpoint-cost-") as folder:
        facts = measure(load_timed_config(options, folder), options.windows)
    facts["environment"] = read_environment()
    if options.out:
        write_json(options.out, facts)
    print(
        f"{facts['parameters']:,} parameters, {facts['mib']:.1f} MiB a checkpoint, "
        f"{1000 * facts['step_s']:.1f} ms a step on {facts['device']}\n"
        f"loop held {facts['held_s']:.3f} s, written and read back in {facts['write_s']:.3f} s, "
        f"{facts['write_cpu_s']:.3f} s of CPU time\n"
        f"cost {facts['cost_s']:.3f} s a checkpoint (median of {options.windows} pairs of windows "
        f"of {facts['window_steps']} steps, {facts['cost_low_s']:.3f} to "
        f"{facts['cost_high_s']:.3f})\n"
        f"share of the loop at one checkpoint a minute: {facts['share_percent']:.2f} %, at most "
        f"{facts['bound_percent']:.2f} %"
    )
    return int(facts["bound_percent"] > options.limit)


def create_parser() -> argparse.ArgumentParser:
    """Create the command line; all other flags are keys of the run."""
    parser = create_program_parser(
        __doc__, prog="python -m proofs.benchmark_checkpoint", allow_abbrev=False
    )
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("--windows", type=int, default=5, help="pairs of windows to time")
    parser.add_argument("--limit", type=float, default=2.0, help="percent above which it fails")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    return parser


def measure(config: RunConfig, windows: int) -> JsonObject:
    """Time steps and checkpoints of a run, in seconds."""
    with open_run(config) as callbacks:
        runtime, parts = callbacks.runtime, callbacks.parts
        steps = run_steps(parts.state, callbacks.get_batches(0), parts.task, runtime, parts.plan)
        with contextlib.closing(steps):
            time_steps(runtime, steps, _WARM_UP)
            facts = _time_windows(callbacks, steps, windows)
    return {
        **facts,
        "parameters": parts.count_parameters(),
        "device": str(runtime.device),
        "config": config.model_dump(mode="json"),
    }


def time_steps(runtime: Runtime, steps: Iterator[StepResult], count: int) -> float:
    """Return the seconds of that many steps, until the device has finished them."""
    began = time.perf_counter()
    result = next(itertools.islice(steps, count - 1, None))
    assert result.values is not None
    runtime.fetch(result.values)
    return time.perf_counter() - began


def _time_windows(callbacks: RunCallbacks, steps: Iterator[StepResult], count: int) -> JsonObject:
    runtime = callbacks.runtime
    step_s = time_steps(runtime, steps, 10) / 10
    callbacks.save(callbacks.parts.state, False)
    callbacks.saving.manager.wait()
    window = max(20, math.ceil(_ROOM * callbacks.saving.manager.written_s / step_s))
    callbacks.saving.manager.pop_blocked_s()
    plain: list[float] = []
    costs: list[float] = []
    held: list[float] = []
    writes: list[float] = []
    cpus: list[float] = []
    for _ in range(count):
        plain.append(time_steps(runtime, steps, window))
        began = time.perf_counter()
        callbacks.save(callbacks.parts.state, False)
        held.append(callbacks.saving.manager.pop_blocked_s())
        time_steps(runtime, steps, window)
        costs.append(time.perf_counter() - began - plain[-1])
        callbacks.saving.manager.wait()
        writes.append(callbacks.saving.manager.written_s)
        cpus.append(callbacks.saving.manager.written_cpu_s)
    folder = callbacks.saving.manager.folder
    newest = folder.child(folder.list_names()[-1])
    cost_s = statistics.median(costs)
    return {
        "step_s": statistics.median(plain) / window,
        "window_steps": window,
        "held_s": statistics.median(held),
        "write_s": statistics.median(writes),
        "write_cpu_s": statistics.median(cpus),
        "cost_s": cost_s,
        "cost_low_s": min(costs),
        "cost_high_s": max(costs),
        "bound_percent": 100.0 * (statistics.median(held) + statistics.median(cpus)) / 60.0,
        "share_percent": 100.0 * max(cost_s, 0.0) / 60.0,
        "mib": sum(newest.get_size(name) for name in newest.list_names()) / _MIB,
    }


main = CommandLine(create_parser, run, takes_keys=True, logs=True)

if __name__ == "__main__":
    sys.exit(main())
