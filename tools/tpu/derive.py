"""Turns a run's configuration into one that can be traced on any host, with the same step.

The dataset becomes a synthetic one of the same image shape and classes, weights become random,
stored answers are made up: none of that changes the step's graph.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.config import change
from utils.errors import UserError
from utils.storage import is_there, open_folder

if TYPE_CHECKING:
    from torch import nn

    from utils.config import RunConfig
    from utils.config.sections import TeacherSection

# Larger than any warm-up: the length of a run is no part of its step.
_STEPS = 10_000_000
_EXAMPLES_IN_BATCHES = 2
_DEFAULT_TOP_K = 16
# Height, width and channels of a made-up example of a dataset that nobody knows here.
_PHOTO_SHAPE = (400, 500, 3)


def derive_config(
    config: RunConfig, folder: Path, *, batch: int, devices: int, num_classes: int | None = None
) -> RunConfig:
    """The configuration to trace.

    Args:
      folder: an empty directory for made-up weights and answers.
      batch: examples of a step on each device.
      devices: that the step is partitioned over; 1: not at all.
      num_classes: for datasets that are not here.

    Raises:
      UserError: image shape, classes or a teacher cannot be told.
    """
    side, channels = find_image_shape(config)
    classes = config.model.num_classes or num_classes or find_classes(config)
    size = batch * devices
    examples = size * _EXAMPLES_IN_BATCHES
    derived = change(
        config,
        data={
            "source": "synthetic",
            "name": f"image_size={side},channels={channels},num_classes={classes},"
            f"num_examples={examples}",
            "train_pp": _keep_device_op(config.data.train_pp),
            "eval_pp": _keep_device_op(config.data.eval_pp),
            "train_split": "train", "eval_split": "validation", "test_split": "", "order": "auto",
            "global_batch_size": size, "eval_batch_size": None, "return_id": False,
        },
        model={"pretrained": False, "weights": "", "num_classes": classes},
        train={"steps": _STEPS, "log_every_steps": 1},
        runtime={
            "device": "xla", "num_processes": 1, "graph_budget": 1_000_000,
            "parallel": "spmd" if devices > 1 else config.runtime.parallel,
        },
        run={
            "output_dir": str(folder / "runs"), "resume": "", "eval_only": False,
            "tensorboard": False, "experiment": "traced", "run_id": "traced",
        },
    )  # fmt: skip
    return _derive_teachers(derived, config.distill.teacher_cache, (side, channels), folder)


def find_image_shape(config: RunConfig) -> tuple[int, int]:
    """Side and channels of an example after data.train_pp, by running it on a made-up image."""
    data = config.data
    if data.source == "synthetic":
        from big_vision.input.synthetic import parse_synthetic_name

        size = {"image_size": config.model.image_size} if config.model.image_size else {}
        shape = parse_synthetic_name(data.name, **size)
        return shape.image_size, shape.channels
    from big_vision.pp.builder import get_preprocess_fn
    from big_vision.pp.device_ops import split_device_ops

    spec, _ = split_device_ops(data.train_pp)
    source = _find_source_shape(config) or _PHOTO_SHAPE
    example = {"image": _encode_image(source), data.label_key: 0}
    try:
        image = get_preprocess_fn(spec)(example)["image"]
    except Exception as error:
        height, width, _ = source
        raise UserError(
            f"data.train_pp ({data.train_pp!r}) fails on a made-up image of {height} x {width}: "
            f"{error}; correct it"
        ) from error
    height, width, channels = image.shape
    if height != width:
        raise UserError(
            f"data.train_pp gives images of {height} x {width}; only square ones can be compiled"
        )
    return int(height), int(channels)


def find_classes(config: RunConfig) -> int:
    """Classes of the run's dataset: from its files, or as TFDS knows it by name."""
    from datasets import describe_dataset, require_images

    try:
        facts = describe_dataset(config.data, config.model.known_sizes)
        return require_images(facts.examples["train"], config.data.source).num_classes
    except UserError:
        if config.data.source != "tfds":
            raise
    try:
        return int(_read_features(config)[config.data.label_key].num_classes)
    except Exception as error:
        raise UserError(
            f"the classes of data.name {config.data.name!r} are not known here; give --num-classes"
        ) from error


def _read_features(config: RunConfig) -> Any:
    """What TFDS knows of the dataset's examples, from its files or by its name alone."""
    import tensorflow_datasets as tfds

    try:
        builder = tfds.builder(config.data.name, data_dir=config.data.root or None)
    except Exception:
        builder = tfds.builder(config.data.name)
    return builder.info.features


def _find_source_shape(config: RunConfig) -> tuple[int, int, int] | None:
    """(H, W, C) of the dataset's own images, where all have one shape and it is known here."""
    if config.data.source != "tfds":
        return None
    try:
        shape = _read_features(config)[config.data.image_key].shape
    except Exception:
        return None
    return shape if len(shape) == len(_PHOTO_SHAPE) and None not in shape else None


def _encode_image(shape: tuple[int, int, int]) -> bytes:
    """A JPEG of one colour."""
    from PIL import Image

    height, width, channels = shape
    mode, colour = ("L", 90) if channels == 1 else ("RGB", (90, 120, 150))
    buffer = io.BytesIO()
    Image.new(mode, (width, height), colour).save(buffer, "JPEG")
    return buffer.getvalue()


def _keep_device_op(spec: str) -> str:
    """The string's value range, written out: all of it that happens on the device."""
    from big_vision.pp.device_ops import Normalisation, split_device_ops

    _, normalisation = split_device_ops(spec)
    if normalisation == Normalisation():
        return "value_range(0, 255)"
    mean, std = (list(values) for values in normalisation)
    return f"vgg_value_range({mean}, {std})"


def _derive_teachers(
    config: RunConfig, cache: str, image: tuple[int, int], folder: Path
) -> RunConfig:
    from models import EMA, get_teacher_sections

    sections = get_teacher_sections(config.distill)
    if not sections:
        return config
    classes, seen = config.model.num_classes, None if cache else image
    made = [
        one
        if one.model == EMA
        else _create_random_teacher(one, classes, seen, folder / f"teacher{number}")
        for number, one in enumerate(sections)
    ]
    update = {
        "teacher": "", "teacher_weights": "", "teacher_cache": "", "cache_end": "cycle",
        "teachers": [one.model_dump() for one in made],
    }  # fmt: skip
    live = change(config, distill=update)
    if not cache:
        return live
    target = folder / "answers"
    _write_answers(live, _read_top_k(cache), target)
    return change(live, distill={"teacher_cache": str(target)})


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


def _create_random_teacher(
    section: TeacherSection, classes: int, image: tuple[int, int] | None, target: Path
) -> TeacherSection:
    """The same teacher with random weights in a file; its transform as the run would choose it.

    Args:
      image: side and channels of what the student sees; none: the step does not ask the teacher.
      target: a directory to make.
    """
    from models.factory import build_model, export_model
    from utils.weights import open_weights

    is_here = bool(section.weights) and is_there(section.weights)
    facts = open_weights(section.weights, "distill.teacher_weights").facts if is_here else {}
    name = section.model or facts.get("model", "")
    if not name:
        raise UserError(
            f"distill.teacher_weights ({section.weights!r}) is not here and does not say its "
            "model; name it by distill.teacher"
        )
    own = section.num_classes or facts.get("num_classes") or classes
    arguments = {**facts.get("args", {}), **section.args, "num_classes": own}
    if image is not None:
        shadow = build_model(name, arguments, key="distill.teacher", device="meta")
        _try_teacher(shadow, name, section.size or image[0], channels=image[1])
    model = build_model(name, arguments, key="distill.teacher")
    target.mkdir(parents=True)
    path = export_model(model.state_dict(), {"model": name}, target)
    (target / "student.json").unlink()
    given = {"model": name, "weights": str(path), "num_classes": own}
    arguments = {**facts.get("args", {}), **section.args}
    return type(section)(**{**section.model_dump(), **given, "args": arguments})


def _read_top_k(cache: str) -> int:
    """Answers stored for each example: as the manifest says, or the tool's default."""
    try:
        manifest = json.loads(open_folder(cache).read_text("manifest.json"))
        return int(manifest["top_k"])
    except (OSError, ValueError, KeyError, TypeError):
        return _DEFAULT_TOP_K


def _write_answers(live: RunConfig, top_k: int, target: Path) -> None:
    """A cache of random answers in the run's form."""
    import torch

    from job.check import describe_answers
    from job.spec import with_input_processes
    from tasks.teacher_cache import CacheShape, CacheWriter, pack_answers, write_manifest

    stream, teachers, classes = describe_answers(live)
    size = live.data.global_batch_size
    top_k = min(top_k, classes)
    shape = CacheShape(top_k, classes, 1, _EXAMPLES_IN_BATCHES, size)
    write_manifest(target, with_input_processes(stream, 1), teachers, shape, 1)
    writer = CacheWriter(target, shape, 0)
    for _ in range(shape.steps_per_epoch):
        writer.append(pack_answers(torch.randn(size, classes), shape))
