"""Validation of a classification before a device is touched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from big_vision.input.images.class_weights import resolve_class_weights
from big_vision.input.images.labelled import ImageFacts
from big_vision.input.source import Role, require_facts
from datasets import describe_dataset, load_labels
from losses.tasks.classes import ClassLoss, create_class_loss
from losses.weighted import WeightedLoss, create_weighted_loss
from models.teachers.classes import check_teacher_names
from models.teachers.teacher import (
    SELVES,
    Teacher,
    create_teachers,
    get_teacher_sections,
    open_teacher,
)
from models.transforms import InputTransform
from tasks.classify.built_students import check_reused
from tasks.classify.mutual import check_peer, create_peer
from tasks.classify.rotations import check_rotations
from tasks.classify.views import check_kept, check_strong_view, list_streams
from tasks.evaluation.evaluator import check_sets
from tasks.evaluation.sets import EvaluatedSet, ModelClasses
from tasks.images.dry_run import (
    ImageShapes,
    check_images,
    create_student_transform,
    describe_images,
    find_feature_shapes,
    get_image_shapes,
)
from tasks.images.pixels import check_pairs, check_strings, describe_student
from tasks.images.resizing import check_begins, check_sizes, count_sides, get_only_side
from tasks.protocol import TaskFacts
from tasks.teachers.cache.manifest import read_manifest
from tasks.teachers.cache.reader import open_cache
from tasks.teachers.cache.rows import CLASSES, AnswerForm
from tasks.teachers.dry_run import FeatureShapes, dry_run_layers, dry_run_losses
from tasks.teachers.taught import TaughtCheck
from tasks.teachers.teaching import check_groups, check_layers
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.log import get_logger
from utils.weights.class_names import ClassSide, require_same_classes

if TYPE_CHECKING:
    from utils.config.load import RunConfig
    from utils.config.train import TrainSection


@dataclass(frozen=True, kw_only=True)
class ClassifyFacts(TaskFacts):
    """Facts about a classification of images."""

    num_classes: int  # of student, teachers and dataset
    # (H, W, C) of the images by role, by the preprocessing strings; None if known only in a run.
    image_shapes: ImageShapes
    # Shapes of the layers that losses read; None if known only in a run.
    feature_shapes: FeatureShapes | None
    sets: tuple[EvaluatedSet, ...] = ()  # evaluated in addition to the evaluation split
    class_weights: tuple[float, ...] = ()  # in the task loss, one for each class; empty: all 1

    @property
    def answers(self) -> tuple[AnswerForm, ...]:
        return (AnswerForm(CLASSES, self.num_classes),)


# (train section, number of classes) -> the loss of the targets.
CreateLoss = Callable[["TrainSection", int], ClassLoss]


def set_class_weights(section: TrainSection, weights: tuple[float, ...]) -> TrainSection:
    """Return the section with the weights of classes as numbers."""
    return type(section).model_validate({**section.model_dump(), "class_weights": weights})


class ClassifyCheck(TaughtCheck):
    """Checks a configuration, then the student on the meta device; UserError at the first fault."""

    losses: WeightedLoss

    create_loss: CreateLoss = staticmethod(create_class_loss)

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        check_strings(config)
        if not config.data.label_key:
            raise UserError(
                f"train.task={config.train.task} needs data.label_key; set it, or train.task=distil"
            )
        self.dataset = describe_dataset(config.data, config.model.known_sizes)
        self.num_classes = self._choose_classes()
        names = self._get_images("eval").class_names
        self.class_names = names if names and len(names) == self.num_classes else None
        self.model_arguments = {"num_classes": self.num_classes}
        if self.class_names is not None:
            self.model_arguments["class_names"] = self.class_names
        self._class_weights = self._resolve_class_weights()
        section = set_class_weights(config.train, self._class_weights)
        self.losses = create_weighted_loss(
            config.distill, self.create_loss(section, self.num_classes)
        )
        self._shapes: ImageShapes = {}
        self._feature_shapes: FeatureShapes | None = None
        self._sets: tuple[EvaluatedSet, ...] = ()

    @property
    def stream(self) -> JsonObject:
        return {"num_classes": self.num_classes}

    def _choose_classes(self) -> int:
        config, images = self.config, self._get_images("train")
        if images.several_labels or self._get_images("eval").several_labels:
            raise UserError(
                f"data.label_key ({config.data.label_key}) holds lists of labels, but train.task="
                "classify needs one class each; use another key, set train.task=multilabel, or "
                "evaluate such lists by data.evals or python -m tools.evaluate"
            )
        dataset_classes = images.num_classes
        classes = config.model.num_classes or dataset_classes
        if classes < dataset_classes:
            raise UserError(
                f"model.num_classes ({classes}) is less than the {dataset_classes} classes of "
                f"{config.data.name or config.data.source}; raise it or leave it out"
            )
        if classes == 1:
            name = f" ({images.class_names[0]!r})" if images.class_names else ""
            raise UserError(
                f"data.train_split ({config.data.train_split}) has only one class{name}; use a set "
                "of two classes or more, or set train.task=distil"
            )
        if classes > dataset_classes:
            name, unused = config.data.name or config.data.source, classes - dataset_classes
            text = "model.num_classes (%d) exceeds the %d classes of %s: %d outputs have no example"
            get_logger().warning(text, classes, dataset_classes, name, unused)
        return classes

    def _resolve_class_weights(self) -> tuple[float, ...]:
        config, key = self.config, "train.class_weights"
        names = self._get_images("train").class_names
        load = partial(load_labels, config.data, key, config.model.known_sizes)
        given = config.train.class_weights
        weights = resolve_class_weights(given, key, self.num_classes, names, load)
        if weights and not isinstance(given, tuple):
            most, least = int(np.argmax(weights)), int(np.argmin(weights))
            text = "%s: from %.4g (class %s) to %.4g (class %s)"
            shown = [names[n] if names and n < len(names) else n for n in (least, most)]
            get_logger().info(text, key, weights[least], shown[0], weights[most], shown[1])
        return weights

    def _get_images(self, role: Role) -> ImageFacts:
        return require_facts(self.dataset.examples[role], ImageFacts, self.config.data.source)

    def check_micro_batch(self, examples: int, devices: int) -> None:
        check_micro_batch(self.config, self.losses, examples, devices)

    def dry_run(self, student: nn.Module) -> None:
        config = self.config
        self._shapes = get_image_shapes(self.dataset)
        transform = create_student_transform(config, self._shapes)
        check_reused(config, self.losses)
        check_rotations(config, self.losses, self._shapes)
        teachers = self._create_teachers(student, transform)
        has_token = hasattr(student, "set_distilled_training")
        dry_run_losses(config.distill, self.losses, self.num_classes, has_token=has_token)
        live: list[Teacher] = [] if config.distill.teacher_cache else teachers
        check_images(config, student, live, self._shapes)
        check_sizes(config, student, self.losses, self._shapes["train"], live)
        check_strong_view(config, self.losses, self._shapes)
        if config.distill.peer:
            peer = create_peer(config, self.num_classes, "meta")
            check_peer(config, self.losses, peer, transform, self._shapes)
            self.losses.peer = peer
        classes = ModelClasses(self.num_classes, self.class_names)
        self._sets = check_sets(config.data, classes, student)
        if self._shapes["train"] is not None and not config.distill.teacher_cache:
            side = get_only_side(config.train.image_sizes)
            train = self._shapes["train"]
            shapes = find_feature_shapes(student, teachers, self.losses, train, side)
            with torch.device("meta"):
                self.losses.build(*shapes)
            dry_run_layers(config.distill, self.losses, self.num_classes, shapes)
            self._feature_shapes = shapes

    def find_facts(self) -> ClassifyFacts:
        return self.gather(
            ClassifyFacts,
            f"{self.num_classes} classes{describe_images(self._shapes)}",
            export=self._describe_export(),
            num_classes=self.num_classes,
            class_names=self.class_names,
            streams=tuple(list_streams(self.config)),
            step_shapes=count_sides(self.config.train),
            image_shapes=self._shapes,
            feature_shapes=self._feature_shapes,
            sets=self._sets,
            class_weights=self._class_weights,
        )

    def check_stream(self, stream: JsonObject, total_steps: int) -> None:
        steps = self.dataset.num_examples["train"] // self.config.data.global_batch_size
        check_begins(self.config.train, steps, total_steps)
        cache = self.config.distill.teacher_cache
        if not cache:
            return
        open_cache(self.config.distill, stream, self.teachers, (0, 1), total_steps)
        require_same_classes(
            ClassSide("the student", self.class_names),
            ClassSide(f"distill.teacher_cache {cache!r}", read_manifest(cache).get("class_names")),
            way="make the cache again with this run's data",
        )

    def _create_teachers(self, student: nn.Module, transform: InputTransform) -> list[Teacher]:
        config = self.config
        for section in get_teacher_sections(config.distill):
            if section.model not in SELVES:
                check_teacher_names(open_teacher(section), self.num_classes, self.class_names)
        teachers = create_teachers(
            config.distill,
            num_classes=self.num_classes,
            class_names=self.class_names,
            student_transform=transform,
            device="meta",
        )
        check_layers(config, self.losses, student, teachers)
        check_kept(config, self.losses, student, teachers, self._shapes["train"])
        return teachers

    def _describe_export(self) -> JsonObject:
        train, names = self.config.train, self.class_names
        # Scores are a sigmoid for each class, or a softmax over all classes.
        is_each = train.task == "multilabel" or train.task_loss not in ("", "softmax")
        return {
            **describe_student(self.config, self.num_classes),
            **({"scores": "each"} if is_each else {}),
            **({"classes": list(names)} if names else {}),
        }


def check_micro_batch(config: RunConfig, losses: WeightedLoss, examples: int, devices: int) -> None:
    """Refuse a number of examples in a device's micro-batch that splits a pair or a group.

    Mixing works on pairs, and some losses compare the examples of a group.
    """
    check_pairs(config, examples, devices)
    check_groups(losses, examples, devices)
