"""The configuration that is measured: the run's own, with what a measurement changes of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bill.step.synthetic_run import create_synthetic_run, get_default_sizes
from datasets import create_source
from models.teachers.teacher import get_teacher_sections
from utils.config.load import change
from utils.errors import UserError
from utils.log import get_logger

if TYPE_CHECKING:
    from tasks.protocol import SyntheticRun
    from utils.config.load import RunConfig

_SYNTHETIC_EXAMPLES = 50_000


def create_measured_config(
    config: RunConfig, scratch: Path, *, synthetic: bool, random_teachers: bool
) -> RunConfig:
    """Change the run's configuration to a new run that writes nothing, on the chosen input.

    Args:
      scratch: where synthetic data and random teachers are written.

    Raises:
      UserError: keys that this measurement cannot honour.
    """
    if config.profile.steps:
        get_logger().warning("profile.steps is ignored: a trace would be measured with the step")
    # A run of its own: nothing of the measured one is read or written.
    run = {"output_dir": str(scratch), "resume": "", "run_id": "", "eval_only": False}
    changed = change(config, run={**run, "tensorboard": False}, profile={"steps": ""})
    if synthetic and config.distill.teacher_cache:
        raise UserError(
            "--input synthetic does not go with distill.teacher_cache, whose answers belong to the "
            "dataset; use --input real"
        )
    if random_teachers and not get_teacher_sections(config.distill):
        raise UserError("--random-teachers needs a teacher; set distill.teacher")
    needs_data = synthetic and not create_source(config.data).is_synthetic
    if not needs_data and not random_teachers:
        return changed
    stand_in = _create_synthetic_run(changed)
    if needs_data:
        changed = stand_in.replace_data(
            max(_SYNTHETIC_EXAMPLES, config.data.global_batch_size), scratch
        )
    if random_teachers:
        changed = stand_in.replace_teachers(changed, scratch, only_missing=True)
    return changed


def _create_synthetic_run(config: RunConfig) -> SyntheticRun:
    """Create the synthetic run; a dataset without known metadata gets the default sizes."""
    try:
        return create_synthetic_run(config, {})
    except UserError as error:
        sizes = get_default_sizes(config)
        if not sizes:
            raise
        text = ", ".join(f"{name} {number}" for name, number in sizes.items())
        get_logger().warning("%s is assumed: %s", text, error)
        return create_synthetic_run(config, sizes)
