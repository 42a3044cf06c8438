"""How many micro-batches a step is split into, where `train.accumulate_steps` is auto.

The TPU compiler's verdict on the step decides, which the configuration keeps by chip and examples;
where there is no TPU a step is one batch.
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
    """A hash of what decides a step's program, but for the batch and how it is split."""
    plain = change(config, train={"accumulate_steps": 1, "verdicts": {}})
    return hash_step(plain.model_dump(mode="json"))


def check_automatic_parts(config: RunConfig, student: nn.Module, chip: str) -> None:
    """Refuse what the verdicts cannot decide, before a device is touched.

    Args:
      chip: such as v5e; empty: no TPU, or one that does not tell.

    Raises:
      UserError: the student has BatchNorm, or nothing is known of the chip.
    """
    if config.train.accumulate_steps != "auto":
        return
    if has_batch_norm(student):
        raise UserError(
            f"train.accumulate_steps (auto) would decide by cost over how many images BatchNorm of "
            f"{config.model.name} takes its statistics; give a number"
        )
    names = list(config.train.verdicts)
    if chip and not any(name.startswith(f"{chip}:") for name in names):
        raise UserError(_say_missing(chip, "IMAGES", names))


def settle_micro_batches(job: Job, chip: str, devices: int) -> Job:
    """The job with a number of micro-batches, which is said.

    Args:
      chip: that the step runs on, such as v5e; empty: no TPU.
      devices: that the global batch is dealt to.

    Raises:
      UserError: there is no verdict on this step.
    """
    config = job.config
    if config.train.accumulate_steps != "auto":
        return job
    parts, reason = choose_parts(config, job.step, chip, config.data.global_batch_size // devices)
    get_logger().info("train.accumulate_steps (auto) is %d: %s", parts, reason)
    return replace(job, config=change(config, train={"accumulate_steps": parts}))


def choose_parts(config: RunConfig, step: str, chip: str, examples: int) -> tuple[int, str]:
    """Micro-batches of a step and why.

    Args:
      step: hash of what decides its program.
      examples: of the step on one chip.

    Raises:
      UserError: the configuration holds no verdict on it, or one on another step.
    """
    if not chip:
        return 1, "there is no TPU here"
    name = f"{chip}:{examples}"
    found = config.train.verdicts.get(name)
    if found is None:
        raise UserError(_say_missing(chip, examples, list(config.train.verdicts)))
    if found.step != step:
        way_out = _WAY_OUT.format(chip, examples)
        raise UserError(
            f"train.verdicts.{name} is of another step ({found.step}, now {step}): what decides "
            f"its program has changed; run {way_out}"
        )
    return found.parts, (
        f"by the compiler's verdict {examples} examples a {chip} cost least "
        f"{examples // found.parts} at a time (graph {found.graph})"
    )


def get_examples_per_chip(chip: str, examples: int) -> int:
    """Of a chip, from those of what the compiler calls a device: v4's is one of two cores."""
    return examples * GENERATIONS[chip].devices_per_chip


def _say_missing(chip: str, examples: int | str, names: list[str]) -> str:
    known = ", ".join(names) or "none"
    return (
        f"train.accumulate_steps (auto) has no verdict for {chip}:{examples} in train.verdicts "
        f"({known}); run {_WAY_OUT.format(chip, examples)}"
    )
