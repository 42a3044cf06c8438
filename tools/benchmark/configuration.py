"""The configuration that is measured: the run's own, with what a measurement changes of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tools import twin
from utils.config import change
from utils.errors import UserError
from utils.log import get_logger

if TYPE_CHECKING:
    from utils.config import RunConfig

FALLBACK_CLASSES = 1000
_SYNTHETIC_EXAMPLES = 50_000


def create_measured_config(
    config: RunConfig, scratch: Path, *, synthetic: bool, random_teachers: bool
) -> RunConfig:
    """The run's configuration as a new run that writes nothing, on the input that is asked for.

    Args:
      scratch: where random teachers are written.

    Raises:
      UserError: keys that this measurement cannot honour.
    """
    if config.profile.steps:
        get_logger().warning("profile.steps is ignored: a trace would be measured with the step")
    run = {"output_dir": str(scratch), "resume": "", "run_id": "", "eval_only": False}
    changed = change(config, run={**run, "tensorboard": False}, profile={"steps": ""})
    classes = count_classes(changed) if synthetic or random_teachers else 0
    if synthetic:
        changed = _use_synthetic_input(changed, classes)
    if random_teachers:
        changed = _use_random_teachers(changed, scratch, classes)
    return changed


def count_classes(config: RunConfig) -> int:
    """Classes of the student: as given, as the dataset tells, or 1000 where there is none."""
    try:
        return twin.find_classes(config)
    except UserError as error:
        get_logger().warning("%d classes are assumed: %s", FALLBACK_CLASSES, error)
        return FALLBACK_CLASSES


def _use_synthetic_input(config: RunConfig, classes: int) -> RunConfig:
    """Made-up images of the same shape, classes and batch."""
    if config.distill.teacher_cache:
        raise UserError(
            "--input synthetic does not go with distill.teacher_cache, whose answers belong to the "
            "dataset; use --input real"
        )
    if config.data.source == "synthetic":
        return config
    image = twin.find_image_shape(config)
    if image is None:
        raise UserError(
            f"--input synthetic finds no one size in data.train_pp ({config.data.train_pp!r}); end "
            "it with a resize or crop to one side, or set data.source=synthetic with "
            "data.name=image_size=N"
        )
    examples = max(_SYNTHETIC_EXAMPLES, config.data.global_batch_size)
    return change(config, data=twin.describe_twin_data(config, image, classes, examples))


def _use_random_teachers(config: RunConfig, scratch: Path, classes: int) -> RunConfig:
    """Random weights for teachers that have none: what they know does not change their cost."""
    from models import EMA, get_teacher_sections

    sections = get_teacher_sections(config.distill)
    if not sections:
        raise UserError("--random-teachers needs a teacher; set distill.teacher")
    teachers = [
        section
        if section.model == EMA or section.weights
        else twin.create_random_teacher(section, classes, scratch / f"teacher_{number}")
        for number, section in enumerate(sections)
    ]
    given = [one.model_dump() for one in teachers]
    return change(config, distill={"teacher": "", "teacher_weights": "", "teachers": given})
