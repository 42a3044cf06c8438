"""The configuration that is measured: the run's own, with what a measurement changes of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from big_vision.pp import shapes as pp_shapes
from utils.config import change
from utils.errors import UserError
from utils.log import get_logger

if TYPE_CHECKING:
    from utils.config import RunConfig
    from utils.config.sections import TeacherSection

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
    from datasets import describe_dataset, require_images

    if config.model.num_classes:
        return config.model.num_classes
    try:
        facts = describe_dataset(config.data, config.model.known_sizes)
        return require_images(facts.examples["train"], config.data.source).num_classes
    except UserError as error:
        get_logger().warning("%d classes are assumed: %s", FALLBACK_CLASSES, error)
        return FALLBACK_CLASSES


def find_image_shape(config: RunConfig) -> tuple[int, int]:
    """Side and channels of the training images, told from data.train_pp alone.

    Raises:
      UserError: the string does not tell, or its images are not square.
    """
    shape = pp_shapes.find_image_shape(config.data.train_pp, "data.train_pp", "image")
    if shape is None or shape[0] != shape[1]:
        raise UserError(
            f"--input synthetic finds no square image of one size in data.train_pp "
            f"({config.data.train_pp!r}); end it with a resize or crop to one side, or set "
            "data.source=synthetic with data.name=image_size=N"
        )
    return shape[0], shape[2]


def _use_synthetic_input(config: RunConfig, classes: int) -> RunConfig:
    """Made-up images of the same shape, classes and batch."""
    if config.distill.teacher_cache:
        raise UserError(
            "--input synthetic does not go with distill.teacher_cache, whose answers belong to the "
            "dataset; use --input real"
        )
    if config.data.source == "synthetic":
        return config
    examples = max(_SYNTHETIC_EXAMPLES, config.data.global_batch_size)
    size, count = find_image_shape(config)
    changes = {
        "source": "synthetic",
        "name": f"image_size={size},channels={count},num_classes={classes},num_examples={examples}",
        "root": "",
        "train_pp": "value_range(-1, 1)",
        "eval_pp": "value_range(-1, 1)",
        "test_split": "",
        "order": "auto",
    }
    return change(config, data=changes)


def _use_random_teachers(config: RunConfig, scratch: Path, classes: int) -> RunConfig:
    """Random weights for teachers that have none: what they know does not change their cost."""
    from models import EMA, get_teacher_sections

    sections = get_teacher_sections(config.distill)
    if not sections:
        raise UserError("--random-teachers needs a teacher; set distill.teacher")
    teachers = []
    for number, section in enumerate(sections):
        teacher = section.model_dump()
        if section.model != EMA and not section.weights:
            path = scratch / f"teacher_{number}.safetensors"
            _save_random_weights(section, path, classes)
            teacher["weights"] = str(path)
        teachers.append(teacher)
    return change(config, distill={"teacher": "", "teacher_weights": "", "teachers": teachers})


def _save_random_weights(section: TeacherSection, path: Path, classes: int) -> None:
    import torch
    from safetensors.torch import save_file

    from models.factory import build_model

    torch.manual_seed(0)
    arguments = {**section.args, "num_classes": section.num_classes or classes}
    model = build_model(section.model, arguments, key="distill.teacher")
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, path)
