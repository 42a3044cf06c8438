"""Resolves `train.accumulate_steps: auto`: into how many micro-batches a step is split.

The configuration contains the TPU compiler's estimates by chip and examples, which decide it;
without a TPU a step is one batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from models.batch_norm import has_batch_norm
from store.quality.calibration import hash_step
from utils.config.load import change
from utils.errors import UserError
from utils.generations import GENERATIONS
from utils.log import get_logger

if TYPE_CHECKING:
    from torch import nn

    from job.spec import Job
    from utils.config.load import RunConfig

_WAY_OUT = "python -m tools.compile_for_tpu --config FILE --target {}:1x1 --batch {} "
_WAY_OUT += "--micro-batches --write, or give a number"


def compute_step_hash(config: RunConfig) -> str:
    """Hash all that determines a step's program, except the batch and its micro-batches."""
    plain = change(config, train={"accumulate_steps": 1, "verdicts": {}})
    return hash_step(plain.model_dump(mode="json"))


def check_automatic_parts(config: RunConfig, student: nn.Module, chip: str) -> None:
    """Refuse what the estimates cannot decide; `chip` is such as v5e, empty without a TPU."""
    if config.train.accumulate_steps != "auto":
        return
    if has_batch_norm(student):
        raise UserError(
            f"train.accumulate_steps (auto) is not supported with the BatchNorm of "
            f"{config.model.name}: it would decide how many images its statistics are of; give a "
            "number"
        )
    names = list(config.train.verdicts)
    if chip and not any(name.startswith(f"{chip}:") for name in names):
        raise UserError(_describe_missing(chip, "IMAGES", names))


def resolve_micro_batches(job: Job, chip: str, devices: int) -> Job:
    """Return the job with a number of micro-batches, logged; `chip` is empty without a TPU."""
    config = job.config
    if config.train.accumulate_steps != "auto":
        return job
    parts, reason = choose_parts(config, job.step, chip, config.data.global_batch_size // devices)
    get_logger().info("train.accumulate_steps (auto) is %d: %s", parts, reason)
    return replace(job, config=change(config, train={"accumulate_steps": parts}))


def choose_parts(config: RunConfig, step: str, chip: str, examples: int) -> tuple[int, str]:
    """Choose the number of micro-batches of a step; return it with the reason.

    `step` is the hash of its program, `examples` those of the step on one chip. UserError if the
    configuration has no estimate of it, or one of another step.
    """
    if not chip:
        return 1, "there is no TPU here"
    name = f"{chip}:{examples}"
    verdict = config.train.verdicts.get(name)
    if verdict is None:
        raise UserError(_describe_missing(chip, examples, list(config.train.verdicts)))
    if verdict.step != step:
        way_out = _WAY_OUT.format(chip, examples)
        raise UserError(
            f"train.verdicts.{name} is of another step ({verdict.step}, now {step}), because the "
            f"configuration of its program has changed; run {way_out}"
        )
    return verdict.parts, (
        f"by the compiler's verdict {examples} examples a {chip} cost least "
        f"{examples // verdict.parts} at a time (graph {verdict.graph})"
    )


def get_examples_per_chip(chip: str, examples: int) -> int:
    """Return examples of a chip from those of a compiler's device: a v4 core is half a chip."""
    return examples * GENERATIONS[chip].devices_per_chip


def _describe_missing(chip: str, examples: int | str, names: list[str]) -> str:
    known = ", ".join(names) or "none"
    return (
        f"train.accumulate_steps (auto) has no verdict for {chip}:{examples} in train.verdicts "
        f"({known}); run {_WAY_OUT.format(chip, examples)}"
    )
