"""Traces the step that the engine runs on TorchTPU and lowers it to StableHLO, without a TPU.

The device is TorchTPU's own, open on its stand-in; where the first step would be compiled, its
program is taken instead, with math in the place of the fused attention of chips.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bill.step.export import collect_state, describe_run
from bill.step.tracing import StepExport
from engine import run_steps
from job.build import build_parts
from job.check import check
from job.stream import iterate_batches
from utils.config.load import change
from utils.runtime.launcher import find_runtime_class

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine import StepResult
    from job.build import Parts
    from utils.config.load import RunConfig
    from utils.runtime.tpu.program import TracedStep


class _TracedError(Exception):
    """Ends the run where its step would be compiled."""

    def __init__(self, step: TracedStep) -> None:
        self.step = step


def trace_program(config: RunConfig, *, is_automatic: bool = False) -> StepExport:
    """Build the run's parts, let the engine make one step and give its program.

    Args:
      is_automatic: a verdict tells the run how many micro-batches the step has.

    Raises:
      UserError: the run would be refused.
    """
    runtime = type("ProgramRuntime", (_ProgramRuntime, find_runtime_class(config.runtime)), {})(
        config.runtime
    )
    changed = change(config, train={"accumulate_steps": "auto"}) if is_automatic else config
    job = replace(check(changed), config=config)
    with contextlib.closing(build_parts(runtime, job)) as parts:
        runtime.updates.prepare(parts.state.optimizer)
        batches = itertools.islice(iterate_batches(parts, 0), 1)
        steps = run_steps(parts.state, batches, parts.task, runtime, parts.plan)
        with contextlib.closing(steps):
            export = _take_program(steps, parts)
        describe_run(export, job, parts, "torch_tpu")
    return export


class _ProgramRuntime:
    """Traces the step instead of compiling it."""

    def compile_step(self, function: Any, budget: int) -> Any:
        from utils.runtime.tpu.program import trace_step

        def trace(batch: Any, numbers: Any) -> None:
            raise _TracedError(trace_step(function, batch, numbers))

        return trace


def _take_program(steps: Iterator[StepResult], parts: Parts) -> StepExport:
    try:
        next(steps)
    except _TracedError as traced:
        return _lower(traced.step, parts)
    raise RuntimeError("the engine made a step without compiling it")


def _lower(step: TracedStep, parts: Parts) -> StepExport:
    from utils.runtime.tpu.lowering import lower_step

    bytecode, text = lower_step(step)
    names = {id(tensor): name for name, tensor in collect_state(parts, "tpu").items()}
    inputs = [node.meta["val"] for node in step.graph.graph.nodes if node.op == "placeholder"]
    arguments = [
        names.get(id(tensor)) or (f"input{list(tensor.shape)}" if tensor.dim() else "scalar")
        for tensor in (*step.state, *inputs[len(step.state) :])
    ]
    digest = hashlib.sha256(text.encode()).hexdigest()
    # The program itself says which arguments' memory it takes.
    return StepExport(bytecode, digest, arguments, {}, [], [])
