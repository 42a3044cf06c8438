"""A synthetic twin of a run: made-up examples, random teachers, random answers, the same step.

What a step costs, and which graph it is, depends on shapes and counts, and not on what examples
show or teachers know. So a run can be measured and compiled where its dataset, its teachers'
weights and its stored answers are not.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from utils.errors import UserError
from utils.json_types import JsonObject
from utils.storage import is_there

if TYPE_CHECKING:
    from torch import nn

    from utils.config import RunConfig
    from utils.config.distill import TeacherSection


def find_image_shape(config: RunConfig) -> tuple[int, int] | None:
    """Side and channels of a training image, as the configuration tells; None: only a run can.

    Raises:
      UserError: the images are not square, or the string is none of images.
    """
    from big_vision.input.synthetic import parse_synthetic_name
    from big_vision.pp import shapes

    data = config.data
    if data.source == "synthetic":
        size = {"image_size": config.model.image_size} if config.model.image_size else {}
        made = parse_synthetic_name(data.name, **size)
        return made.image_size, made.channels
    shape = shapes.find_image_shape(data.train_pp, "data.train_pp", data.image_key)
    return None if shape is None else require_square(shape)


def require_square(shape: tuple[int, int, int]) -> tuple[int, int]:
    """Side and channels of images of (H, W, C), which a synthetic source makes square.

    Raises:
      UserError: they are not square.
    """
    height, width, channels = shape
    if height != width:
        raise UserError(
            f"data.train_pp gives images of {height} x {width}; made-up ones are square: end it "
            "with a resize or crop to one side"
        )
    return height, channels


def find_classes(config: RunConfig) -> int:
    """Classes of the student: as given, or as the dataset that is here tells.

    Raises:
      UserError: the dataset is not here.
    """
    from datasets import describe_dataset, require_images

    if config.model.num_classes:
        return config.model.num_classes
    facts = describe_dataset(config.data, config.model.known_sizes)
    return require_images(facts.examples["train"], config.data.source).num_classes


def name_examples(side: int, channels: int, classes: int, examples: int) -> str:
    """The data.name of made-up images."""
    return f"image_size={side},channels={channels},num_classes={classes},num_examples={examples}"


def describe_twin_data(
    config: RunConfig, image: tuple[int, int], classes: int, examples: int
) -> JsonObject:
    """What keys of `data` become, so that the same uint8 images reach the device.

    Args:
      image: side and channels.
    """
    return {
        "source": "synthetic",
        "name": name_examples(*image, classes, examples),
        "root": "",
        "train_pp": _keep_device_op(config.data.train_pp),
        "eval_pp": _keep_device_op(config.data.eval_pp),
        "test_split": "",
        "order": "auto",
    }


def create_random_teacher(
    section: TeacherSection, classes: int, target: Path, *, image: tuple[int, int] | None = None
) -> TeacherSection:
    """The same teacher with random weights in a file; its transform as the run would choose it.

    Args:
      classes: of the student.
      target: a directory to make.
      image: side and channels of what the student sees, which the teacher is tried on; none: the
        step does not ask the teacher, or has been tried already.

    Raises:
      UserError: its weights are not here and it has no name, or it does not take the images.
    """
    import torch

    from models.factory import build_model
    from utils.weights import EXPORT_FILE, open_weights, write_weights

    is_here = bool(section.weights) and is_there(section.weights)
    facts = open_weights(section.weights, "distill.teacher_weights").facts if is_here else {}
    name = section.model or facts.get("model", "")
    if not name:
        raise UserError(
            f"distill.teacher_weights ({section.weights!r}) is not here and does not say its "
            "model; name it by distill.teacher"
        )
    own = section.num_classes or facts.get("num_classes") or classes
    arguments = {**facts.get("args", {}), **section.args}
    built = {**arguments, "num_classes": own}
    if image is not None:
        shadow = build_model(name, built, key="distill.teacher", device="meta")
        _try_teacher(shadow, name, section.size or image[0], channels=image[1])
    torch.manual_seed(0)
    model = build_model(name, built, key="distill.teacher")
    target.mkdir(parents=True)
    write_weights(target / EXPORT_FILE, model.state_dict(), {"model": name})
    given = {"model": name, "weights": str(target / EXPORT_FILE), "num_classes": own}
    return type(section)(**{**section.model_dump(), **given, "args": arguments})


def write_random_answers(config: RunConfig, top_k: int, target: Path, *, steps: int) -> None:
    """A cache of random answers in the form in which a run's teachers would have given them.

    Args:
      config: of the run with its teachers in the step.
      steps: of an epoch of the cache.
    """
    import torch

    from job.spec import describe_stream, with_input_processes
    from tasks.classify_check import ClassifyCheck
    from tasks.teacher_cache import CacheShape, CacheWriter, pack_answers, write_manifest
    from utils.runtime import choose_device, find_planned_ranks

    found = ClassifyCheck(config)
    processes = find_planned_ranks(config.runtime, choose_device(config.runtime))
    stream = describe_stream(config, found.dataset, found.stream, processes)
    classes = found.num_classes
    size = config.data.global_batch_size
    shape = CacheShape(min(top_k, classes), classes, 1, steps, size)
    write_manifest(target, with_input_processes(stream, 1), found.teachers, shape, 1)
    writer = CacheWriter(target, shape, 0)
    for _ in range(shape.steps_per_epoch):
        writer.append(pack_answers(torch.randn(size, classes), shape))


def _keep_device_op(spec: str) -> str:
    """The string's value range, written out: all of it that happens on the device."""
    from big_vision.pp.device_ops import Normalisation, split_device_ops

    _, normalisation = split_device_ops(spec)
    if normalisation == Normalisation():
        return "value_range(0, 255)"
    mean, std = (list(values) for values in normalisation)
    return f"vgg_value_range({mean}, {std})"


def _try_teacher(shadow: nn.Module, name: str, side: int, channels: int) -> None:
    """Refuse a teacher that cannot see the images: its arguments are in a file that is not here.

    Args:
      shadow: the teacher on the meta device.

    Raises:
      UserError: with the model's own reason.
    """
    import torch

    try:
        with torch.no_grad():
            shadow.eval()(torch.zeros((1, channels, side, side), device="meta"))
    except Exception as error:
        raise UserError(
            f"distill.teacher ({name!r}) without its weights does not take images of {side} x "
            f"{side} x {channels}: {error}; give its run by --teacher_path, or its args in "
            "distill.teachers"
        ) from error
