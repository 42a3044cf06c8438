"""Turns a run's configuration into one that can be traced on any host, with the same step.

The dataset becomes a synthetic one of the same image shape and classes, weights become random,
stored answers are made up: none of that changes the step's graph.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools import twin
from utils.config import change
from utils.errors import UserError
from utils.storage import open_folder

if TYPE_CHECKING:
    from utils.config import RunConfig

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
    image = find_image_shape(config)
    classes = config.model.num_classes or num_classes or find_classes(config)
    size = batch * devices
    derived = change(
        config,
        data={
            **twin.describe_twin_data(config, image, classes, size * _EXAMPLES_IN_BATCHES),
            "train_split": "train", "eval_split": "validation",
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
    return _derive_teachers(derived, config.distill.teacher_cache, image, folder)


def find_image_shape(config: RunConfig) -> tuple[int, int]:
    """Side and channels of a training image, if need be by running data.train_pp on a made-up one.

    Raises:
      UserError: the string fails on it, or gives images that are not square.
    """
    told = twin.find_image_shape(config)
    if told is not None:
        return told
    from big_vision.pp.builder import get_preprocess_fn
    from big_vision.pp.device_ops import split_device_ops

    data = config.data
    spec, _ = split_device_ops(data.train_pp)
    source = _find_source_shape(config) or _PHOTO_SHAPE
    example = {data.image_key: _encode_image(source), data.label_key: 0}
    try:
        image = get_preprocess_fn(spec)(example)[data.image_key]
    except Exception as error:
        height, width, _ = source
        raise UserError(
            f"data.train_pp ({data.train_pp!r}) fails on a made-up image of {height} x {width}: "
            f"{error}; correct it"
        ) from error
    return twin.require_square(tuple(int(side) for side in image.shape))


def find_classes(config: RunConfig) -> int:
    """Classes of the run's dataset: from its files, or as TFDS knows it by name."""
    try:
        return twin.find_classes(config)
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
        else twin.create_random_teacher(one, classes, folder / f"teacher{number}", image=seen)
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
    twin.write_random_answers(live, _read_top_k(cache), target, steps=_EXAMPLES_IN_BATCHES)
    return change(live, distill={"teacher_cache": str(target)})


def _read_top_k(cache: str) -> int:
    """Answers stored for each example: as the manifest says, or the tool's default."""
    try:
        manifest = json.loads(open_folder(cache).read_text("manifest.json"))
        return int(manifest["top_k"])
    except (OSError, ValueError, KeyError, TypeError):
        return _DEFAULT_TOP_K
