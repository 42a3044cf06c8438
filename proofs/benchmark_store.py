"""Measures what the run store's spans and sketches cost the loop.

    python -m proofs.benchmark_store --config configs/x.yaml [flags of main.py]

Times windows of real training steps with log points, in turn with and without the recorder of
spans and quantiles, in one run. Beside it counts the recorder's own processor time a step, without
any training, and what writing `sketches.json` of a million values takes. Exit code 1: the median
of the paired ratios of processor time is above 1.01, or both together take more than 1 % of a step
of 10 ms. Ratios of the clock are printed, too; they need a machine that does nothing else. Further
flags go to main.py's configuration. Nothing is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import run_steps
from proofs.timed_run import load_timed_config, measure_in_turns, open_run
from store.record.environment import read_environment
from utils.json_types import JsonObject
from utils.programs import CommandLine, create_program_parser
from utils.storage.json_files import write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engine import StepResult
    from job.callbacks import RunCallbacks
    from utils.config.load import RunConfig

_WARM_UP = 30
_LOG_EVERY = 10
# The step that the cost is held against.
_STEP_S = 0.010
_DRY_STEPS = 100_000
_VALUES = 1_000_000


def _do_nothing(*_: object) -> None:
    return


class _Nobody:
    """A stand-in for recorder and keeper that does nothing."""

    def __init__(self, done: int) -> None:
        self.done = done

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _do_nothing


def create_parser() -> argparse.ArgumentParser:
    """Create the command line; all other flags are keys of the run."""
    parser = create_program_parser(
        __doc__, prog="python -m proofs.benchmark_store", allow_abbrev=False
    )
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("--pairs", type=int, default=200, help="windows with and without to time")
    parser.add_argument("--steps", type=int, default=20, help="of a window")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    return parser


def run(options: argparse.Namespace) -> int:
    """Measure in a temporary directory, and report; return the exit code."""
    with tempfile.TemporaryDirectory(prefix="store-cost-") as folder:
        facts = measure(load_timed_config(options, folder), options)
    facts["environment"] = read_environment()
    if options.out:
        write_json(options.out, facts)
    print(
        f"{1000 * facts['step_s']:.2f} ms a step on {facts['device']}, a log line every "
        f"{_LOG_EVERY} steps; {options.pairs} pairs of windows of {options.steps} steps\n"
        f"with / without, medians and middle halves: processor {_tell(facts['processor'])}, "
        f"clock {_tell(facts['clock'])}\n"
        f"recorder alone: {facts['recorder_us']:.2f} us of processor time a step; sketches.json "
        f"of {_VALUES:,} values: {facts['write_ms']:.1f} ms, once in {facts['every_s']:.1f} s\n"
        f"together {100 * facts['share']:.2f} % of a step of {1000 * _STEP_S:.0f} ms"
    )
    return int(facts["processor"][1] > 1.01 or facts["share"] > 0.01)


def _tell(quartiles: list[float]) -> str:
    low, middle, high = quartiles
    return f"{middle:.4f} ({low:.4f} to {high:.4f})"


def measure(config: RunConfig, options: argparse.Namespace) -> JsonObject:
    """Ratios, and the recorder's own cost."""
    with open_run(config) as callbacks:
        runtime, parts = callbacks.runtime, callbacks.parts
        steps = run_steps(
            parts.state,
            callbacks.get_batches(0),
            parts.task,
            runtime,
            parts.plan,
            callbacks.begin_step,
        )
        with contextlib.closing(steps):
            time_steps(callbacks, steps, _WARM_UP)
            facts = _time_pairs(callbacks, steps, options)
        facts |= _time_recorder(callbacks)
    return {**facts, "device": str(runtime.device), "config": config.model_dump(mode="json")}


def time_steps(
    callbacks: RunCallbacks, steps: Iterator[StepResult], count: int
) -> tuple[float, float]:
    """Time that many steps with their log lines: processor and wall seconds."""
    runtime = callbacks.runtime
    began, began_s = time.process_time(), time.perf_counter()
    for number in range(1, count + 1):
        result = next(steps)
        if number % _LOG_EVERY == 0:
            assert result.values is not None
            values = runtime.fetch(result.values).tolist()
            callbacks.write(result.step, "train", dict(zip(result.names, values, strict=False)))
    return time.process_time() - began, time.perf_counter() - began_s


def _time_pairs(
    callbacks: RunCallbacks, steps: Iterator[StepResult], options: argparse.Namespace
) -> JsonObject:
    """Time windows with and without the recorder, each pair in the opposite order of the last."""
    runtime, recording = callbacks.runtime, callbacks.recording
    recorder, keeper = recording.recorder, recording.keeper

    def time_window(*, is_on: bool) -> tuple[float, float]:
        nobody: Any = _Nobody(recorder.done)
        recording.recorder, recording.keeper = (recorder, keeper) if is_on else (nobody, nobody)
        runtime.instruments.watcher = recorder if is_on else None
        seconds = time_steps(callbacks, steps, options.steps)
        recorder.end_steps()
        return seconds

    cases = {"on": partial(time_window, is_on=True), "off": partial(time_window, is_on=False)}
    turns = measure_in_turns(cases, options.pairs, alternate=True)
    pairs = zip(turns["on"], turns["off"], strict=True)
    ratios = [(on[0] / off[0], on[1] / off[1]) for on, off in pairs]
    plain = [off[1] / options.steps for off in turns["off"]]
    recording.recorder, recording.keeper, runtime.instruments.watcher = recorder, keeper, recorder
    processor, clock = (statistics.quantiles(side, n=4) for side in zip(*ratios, strict=True))
    return {"step_s": statistics.median(plain), "processor": processor, "clock": clock}


def _time_recorder(callbacks: RunCallbacks) -> JsonObject:
    """Measure a step's cost without training, and the cost of a file of many values."""
    import numpy as np

    with_s, without_s = (_time_dry_steps(callbacks, is_on=is_on) for is_on in (True, False))
    keeper = callbacks.recording.keeper
    values = np.random.default_rng(3).lognormal(-4, 0.5, _VALUES)
    for name in ("step_s", "input_wait_s", "grad_norm"):
        keeper.sketches.add(name, values.tolist())
    began = time.perf_counter()
    keeper.write(callbacks.recording.recorder.done)
    write_s = time.perf_counter() - began
    every_s = keeper.get_wait_s(write_s)
    step_s = (with_s - without_s) / _DRY_STEPS
    return {
        "recorder_us": 1e6 * step_s,
        "write_ms": 1e3 * write_s,
        "every_s": every_s,
        "share": step_s / _STEP_S + write_s / every_s,
    }


def _time_dry_steps(callbacks: RunCallbacks, *, is_on: bool) -> float:
    """Return the processor seconds of steps in which nothing happens."""
    runtime, recording = callbacks.runtime, callbacks.recording
    recorder, keeper = recording.recorder, recording.keeper
    runtime.instruments.watcher = recorder if is_on else None
    first, began = recorder.done, time.process_time()
    for step in range(first, first + _DRY_STEPS):
        if is_on:
            recorder.begin_step(step)
        with runtime.span("input"):
            pass
        with runtime.span("step"):
            pass
        if is_on and step % _LOG_EVERY == 0:
            recorder.end_window(step)
            keeper.add("grad_norm", 1.0)
    return time.process_time() - began


main = CommandLine(create_parser, run, takes_keys=True, logs=True)

if __name__ == "__main__":
    sys.exit(main())
