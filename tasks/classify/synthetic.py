"""A synthetic classification: synthetic images, teachers with random weights, random outputs."""

from __future__ import annotations

import io
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import nn

from big_vision.input.images.labelled import ImageFacts
from big_vision.input.source import require_facts
from big_vision.input.synthetic import parse_synthetic_name
from big_vision.pp import shapes
from big_vision.pp.builder import get_preprocess_fn
from big_vision.pp.device_ops import Normalisation, split_device_ops
from big_vision.tensorflow_setup import read_tfds_features
from datasets import describe_dataset
from models.factory import build_model
from tasks.classify.check import ClassifyCheck
from tasks.protocol import SYNTHETIC_SPLITS, StreamOf, SyntheticRun
from tasks.teachers.cache.manifest import read_manifest, read_shape, write_manifest
from tasks.teachers.cache.rows import CLASSES, AnswerForm, CacheShape, condense_answers, pack_rows
from tasks.teachers.cache.writer import CacheWriter
from tasks.teachers.synthetic import read_facts, replace_each, write_random
from tasks.teachers.teaching import create_columns
from utils.config.load import change
from utils.errors import UserError
from utils.json_types import JsonObject

if TYPE_CHECKING:
    from utils.config.distill import TeacherSection
    from utils.config.load import RunConfig

_DEFAULT_TOP_K = 16
# Height, width and channels of the image tried for a dataset whose own shape is unknown.
_PHOTO_SHAPE = (400, 500, 3)


class SyntheticClassify(SyntheticRun):
    """A classification of synthetic images with the shape and the classes of a run's own."""

    default_sizes = MappingProxyType({"num_classes": 1000})

    def __init__(self, config: RunConfig, given: Mapping[str, int]) -> None:
        self._config = config
        self._classes = config.model.num_classes or given.get("num_classes") or find_classes(config)
        self._image: tuple[int, int] | None = None

    def replace_data(self, examples: int, folder: Path, *, by_trial: bool = False) -> RunConfig:
        """Return the run on synthetic images; `by_trial` runs train_pp if it names no size."""
        config = self._config
        if config.data.mix:  # its first dataset stands for all
            first = next(iter(config.data.train_strings.values()))
            config = change(config, data={"mix": (), "train_pp": first})
        self._image = find_image_shape(config)
        if self._image is None and by_trial:
            self._image = _try_preprocessing(config)
        if self._image is None:
            raise UserError(
                f"synthetic images need one size, but data.train_pp ({config.data.train_pp!r}) "
                "gives none; end it with a resize or crop to a square, or set "
                "data.source=synthetic with data.name=image_size=N"
            )
        classes = max(self._classes, 2)
        data = describe_synthetic_data(config, self._image, classes, examples)
        # Synthetic classes have no names and no counts of their own.
        weights = config.train.class_weights
        weights = weights if isinstance(weights, tuple) else (1.0,) * classes
        return change(config, data=data, train={"class_weights": weights})

    def replace_teachers(
        self, config: RunConfig, folder: Path, *, only_missing: bool = False
    ) -> RunConfig:
        """Write random weights; teachers whose outputs are stored are not tried on the images."""
        image = None if config.distill.teacher_cache else self._image
        create = partial(create_random_teacher, classes=self._classes, image=image)
        return replace_each(config, folder, create, only_missing=only_missing)

    def replace_stored_outputs(
        self, config: RunConfig, folder: Path, steps: int, describe: StreamOf
    ) -> RunConfig:
        """Store random outputs with as many classes per example as the run's own cache."""
        live = change(config, distill={"teacher_cache": "", "cache_end": "cycle"})
        try:
            columns = read_shape(read_manifest(config.distill.teacher_cache)).columns
            top_k = max(column.top_k for column in columns)
        except UserError:
            top_k = _DEFAULT_TOP_K
        write_random_answers(live, top_k, folder / "answers", steps=steps, describe=describe)
        return change(live, distill={"teacher_cache": str(folder / "answers")})


def find_image_shape(config: RunConfig) -> tuple[int, int] | None:
    """Return side and channels of square training images; None if only a run can tell."""
    data = config.data
    if data.source == "synthetic":
        size = {"image_size": config.model.image_size} if config.model.image_size else {}
        made = parse_synthetic_name(data.name, **size)
        return made.image_size, made.channels
    shape = shapes.find_image_shape(data.train_pp, "data.train_pp", data.image_key)
    return None if shape is None else require_square(shape)


def find_classes(config: RunConfig) -> int:
    """Return the classes of the run's dataset: from its files, or from TFDS by name."""
    data = config.data
    try:
        facts = describe_dataset(data, config.model.known_sizes)
        return require_facts(facts.examples["train"], ImageFacts, data.source).num_classes
    except UserError:
        if data.source != "tfds":
            raise
    try:
        return int(read_tfds_features(data.name, data.root)[data.label_key].num_classes)
    except Exception as error:
        raise UserError(
            f"the classes of data.name {data.name!r} are unknown here; give --num-classes"
        ) from error


def _try_preprocessing(config: RunConfig) -> tuple[int, int]:
    """Return side and channels of what data.train_pp makes of a synthetic image."""
    data = config.data
    spec, _ = split_device_ops(data.train_pp)
    source = _find_source_shape(config) or _PHOTO_SHAPE
    example = {data.image_key: _encode_image(source), data.label_key: 0}
    try:
        image = get_preprocess_fn(spec)(example)[data.image_key]
    except Exception as error:
        height, width, _ = source
        raise UserError(
            f"data.train_pp ({data.train_pp!r}) fails on a synthetic image of {height} x {width}: "
            f"{error}; correct it"
        ) from error
    return require_square(tuple(int(side) for side in image.shape))


def _find_source_shape(config: RunConfig) -> tuple[int, int, int] | None:
    """Return (H, W, C) of the dataset's own images; None unless all have one known shape."""
    data = config.data
    if data.source != "tfds":
        return None
    try:
        shape = read_tfds_features(data.name, data.root)[data.image_key].shape
    except Exception:
        return None
    return shape if len(shape) == len(_PHOTO_SHAPE) and None not in shape else None


def _encode_image(shape: tuple[int, int, int]) -> bytes:
    from PIL import Image

    height, width, channels = shape
    mode, colour = ("L", 90) if channels == 1 else ("RGB", (90, 120, 150))
    buffer = io.BytesIO()
    Image.new(mode, (width, height), colour).save(buffer, "JPEG")
    return buffer.getvalue()


def require_square(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return side and channels of images of (H, W, C), which a synthetic source makes square."""
    height, width, channels = shape
    if height != width:
        raise UserError(
            f"data.train_pp gives images of {height} x {width}; synthetic ones are square: end it "
            "with a resize or crop to a square"
        )
    return height, channels


def name_examples(side: int, channels: int, classes: int, examples: int) -> str:
    return f"image_size={side},channels={channels},num_classes={classes},num_examples={examples}"


def describe_synthetic_data(
    config: RunConfig, image: tuple[int, int], classes: int, examples: int
) -> JsonObject:
    """Return the keys of `data` that give uint8 images of that side and channels."""
    return {
        "source": "synthetic",
        "name": name_examples(*image, classes, examples),
        "root": "",
        "train_pp": _keep_device_op(config.data.train_pp),
        "eval_pp": _keep_device_op(config.data.eval_pp),
        "evals": (),
        "sample_weights": (),
        "mix": (),
        **SYNTHETIC_SPLITS,
    }


def create_random_teacher(
    section: TeacherSection, target: Path, *, classes: int, image: tuple[int, int] | None = None
) -> TeacherSection:
    """Return a teacher's section with random weights, written to a file; its transform stays.

    `target` is a directory to create. With 0 `classes`, student and teacher give only features.
    `image` is side and channels of the student's images, on which the teacher is tried; None if the
    step does not run the teacher, or it has been tried already. UserError if the teacher has
    neither readable weights nor a name, or does not take the images.
    """
    facts = read_facts(section)
    name = section.model or facts.get("model", "")
    if not name:
        raise UserError(
            f"distill.teacher_weights ({section.weights!r}) cannot be read, and no key "
            "names their model; set distill.teacher"
        )
    own = (section.num_classes or facts.get("num_classes") or classes) if classes else 0
    arguments = {**facts.get("args", {}), **section.args}
    built = {**arguments, "num_classes": own}
    if image is not None:
        shadow = build_model(name, built, key="distill.teacher", device="meta")
        side = section.size if isinstance(section.size, int) else image[0]
        _try_teacher(shadow, name, side, channels=image[1])
    path = write_random(name, built, target, {})
    given = {"model": name, "weights": str(path), "num_classes": own or None}
    return section.model_validate({**section.model_dump(), **given, "args": arguments})


def write_random_answers(
    config: RunConfig, top_k: int, target: Path, *, steps: int, describe: StreamOf
) -> None:
    """Write a cache of random outputs, in the form of the outputs of a run's live teachers."""
    check = ClassifyCheck(config)
    stream = describe(config, check.dataset, check.stream)
    classes, size = check.num_classes, config.data.global_batch_size
    columns = create_columns(config.distill, [AnswerForm(CLASSES, classes)], top_k)
    shape = CacheShape(columns, 1, steps, size)
    target.mkdir(parents=True, exist_ok=True)
    write_manifest(target, stream, shape, 1)
    writer = CacheWriter(target, shape, 0)
    for _ in range(shape.steps_per_epoch):
        logits = [torch.randn(size, classes) for _ in columns]
        outputs = [condense_answers(values, columns[0].top_k) for values in logits]
        writer.append(pack_rows(outputs, shape))


def _keep_device_op(spec: str) -> str:
    """Return the value range of a preprocessing string, the only part that runs on the device."""
    _, normalisation = split_device_ops(spec)
    if normalisation == Normalisation():
        return "value_range(0, 255)"
    mean, std = (list(values) for values in normalisation)
    return f"vgg_value_range({mean}, {std})"


def _try_teacher(shadow: nn.Module, name: str, side: int, channels: int) -> None:
    """Refuse a teacher, on the meta device, that cannot see the images."""
    try:
        with torch.no_grad():
            shadow.eval()(torch.zeros((1, channels, side, side), device="meta"))
    except Exception as error:
        raise UserError(
            f"distill.teacher ({name!r}), built without weights, does not take images of "
            f"{side} x {side} x {channels}: {error}; give its run by --teacher_path, or its "
            "args in distill.teachers"
        ) from error
