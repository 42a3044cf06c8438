"""Validation of feature distillation before a device is touched."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from big_vision.input.images.labelled import ImageFacts
from big_vision.input.source import require_facts
from datasets import describe_dataset
from losses.label_free.objective import PATCHES, POOLED, Embeddings, create_label_free_loss
from models.teachers.embedding import (
    FeatureTeacher,
    compute_features,
    create_feature_teachers,
    find_grid,
    require_features,
)
from models.teachers.teacher import get_teacher_sections
from models.transforms import InputTransform
from tasks.distil.feature_statistics import FeatureShapes, create_scalings, open_statistics
from tasks.evaluation.probing import ProbedSet, check_probed_sets, check_score
from tasks.images.dry_run import (
    ImageShapes,
    check_images,
    create_student_transform,
    describe_images,
    get_image_shapes,
)
from tasks.images.pixels import check_pairs, check_strings, describe_student
from tasks.images.resizing import check_begins, check_sides, count_sides
from tasks.protocol import TaskFacts
from tasks.teachers.cache.reader import open_cache
from tasks.teachers.cache.rows import FEATURES, AnswerForm, Columns
from tasks.teachers.taught import TaughtCheck
from tasks.teachers.teaching import list_hashes
from utils.errors import UserError
from utils.json_types import JsonObject

if TYPE_CHECKING:
    from losses.label_free.objective import LabelFreeLoss
    from utils.config.load import RunConfig

_PROBED = 2  # examples
# Rows and columns of an image's patches.
Grid = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class DistilFacts(TaskFacts):
    """Facts about a student that learns features."""

    # (H, W, C) of the images by role, from the strings; None if only a run can tell.
    image_shapes: ImageShapes
    sets: tuple[ProbedSet, ...] = ()  # labelled ones for probes of the features
    # What terms read of each teacher; empty if only a run can tell.
    forms: tuple[AnswerForm, ...] = ()

    @property
    def answers(self) -> tuple[AnswerForm, ...]:
        if not self.forms:
            raise UserError(
                "data.train_pp does not tell the size of the images, on which the features to "
                "store depend; end it with a resize or crop to one size"
            )
        return self.forms


@dataclass(frozen=True)
class ProbedModel:
    """Features of a few images of one shape on the meta device; `grid` is None without one."""

    embeddings: Embeddings
    grid: Grid | None


class DistilCheck(TaughtCheck):
    """Checks a configuration, then all models on the meta device; refuses the first fault."""

    losses: LabelFreeLoss

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        if not get_teacher_sections(config.distill):
            raise UserError(
                "train.task=distil needs a teacher; set "
                "distill.teacher or distill.teachers, and distill.losses (--kd cosine)"
            )
        if config.run.eval_only:
            raise UserError(
                "run.eval_only is not supported with train.task=distil, whose projectors are not "
                "exported; use python -m tools.evaluate RUN --probes knn linear"
            )
        check_strings(config)
        self.dataset = describe_dataset(config.data, config.model.known_sizes)
        for role in ("train", "eval"):
            require_facts(self.dataset.examples[role], ImageFacts, config.data.source)
        self.model_arguments = {"num_classes": 0}
        self._statistics = open_statistics(config)
        self.losses = create_loss_of(config)
        self._shapes: ImageShapes = {}
        self._sets: tuple[ProbedSet, ...] = ()
        self._forms: tuple[AnswerForm, ...] = ()

    @cached_property
    def teachers(self) -> list[str]:
        """Return hashes of the teachers, read from their weights, and of their statistics."""
        hashes = list_hashes(self.config.distill)
        return hashes if self._statistics is None else [*hashes, self._statistics.checksum[:16]]

    def check_micro_batch(self, examples: int, devices: int) -> None:
        check_pairs(self.config, examples, devices)

    def dry_run(self, student: nn.Module) -> None:
        config = self.config
        require_features(student, "model.name", config.model.name)
        self._shapes = get_image_shapes(self.dataset)
        transform = create_student_transform(config, self._shapes)
        teachers = create_feature_teachers(
            config.distill, student_transform=transform, device="meta"
        )
        check_images(config, student, teachers, self._shapes)
        check_sides(config, student, self._shapes["train"])
        _check_terms(config, self.losses, self._shapes)
        width: Any = student.num_features
        self._sets = check_probed_sets(config.data, student, width)
        if config.distill.score:
            check_score(config.distill.score, self._sets)
        if self._shapes["train"] is not None:
            mine, theirs = look_at(student, teachers, transform, self._shapes["train"])
            check_comparable(config, self.losses, mine, theirs)
            with torch.device("meta"):
                self.losses.build(mine.embeddings, [seen.embeddings for seen in theirs])
            for spec, loss in zip(self.losses.terms, self.losses.losses, strict=True):
                features = theirs[spec.teacher].embeddings.get(spec.of)
                # A copy: a loss's memory belongs to the run. Autocast does not support meta.
                deepcopy(loss).to("meta").compute(features, features, None)
            shapes = list_shapes(self.losses, theirs)
            create_scalings(config, shapes)
            self._forms = tuple(
                AnswerForm(FEATURES, width, rows if of == PATCHES else 0, of, number)
                for number, kinds in enumerate(shapes)
                for of, (rows, width) in kinds.items()
            )

    def find_facts(self) -> DistilFacts:
        return self.gather(
            DistilFacts,
            f"features{describe_images(self._shapes)}",
            export=describe_student(self.config, classes=0),
            step_shapes=count_sides(self.config.train),
            # Two tables of features and the neighbours of each set.
            set_graphs=3 * len(self.config.data.evals),
            image_shapes=self._shapes,
            sets=self._sets,
            forms=self._forms,
        )

    def check_stream(self, stream: JsonObject, total_steps: int) -> None:
        distill = self.config.distill
        if distill.teacher_cache:
            known = list_cached_hashes(self.config, self.teachers)
            cache = open_cache(distill, stream, known, (0, 1), total_steps)
            stored = {
                (column.teacher, column.part, column.width, column.places)
                for column in cache.columns
            }
            for form in self._forms:
                assert form.teacher is not None
                if (known[form.teacher], form.part, form.width, form.places) not in stored:
                    raise UserError(
                        f"distill.teacher_cache ({distill.teacher_cache!r}) has no {form.part} "
                        f"features of teacher number {form.teacher + 1}, which distill.losses "
                        "compare; store them with these losses by python -m tools.cache write"
                    )
        steps = self.dataset.num_examples["train"] // self.config.data.global_batch_size
        check_begins(self.config.train, steps, total_steps)


def list_cached_hashes(config: RunConfig, teachers: list[str]) -> list[str]:
    """Return the teachers' hashes as in a cache, without that of their statistics."""
    count = len(get_teacher_sections(config.distill))
    return teachers[: count + (count > 1)]


def take_stored(columns: Columns, stored: Sequence[Tensor], teacher: str) -> Embeddings:
    """Return one teacher's features, by its hash, from those that a batch carries by columns."""
    own = {
        column.part: features
        for column, features in zip(columns, stored, strict=True)
        if column.teacher == teacher
    }
    return Embeddings(own.get(POOLED), own.get(PATCHES))


def create_loss_of(config: RunConfig) -> LabelFreeLoss:
    return create_label_free_loss(config.distill, get_teacher_sections(config.distill))


def look_at(
    student: nn.Module,
    teachers: list[FeatureTeacher],
    transform: InputTransform,
    image_shape: tuple[int, int, int],
) -> tuple[ProbedModel, list[ProbedModel]]:
    """Find the features of student and teachers, on the meta device, for images of (H, W, C)."""
    height, width, channels = image_shape
    mine = _look(student.eval(), transform, (channels, height, width))
    probed = []
    for teacher in teachers:
        size = teacher.transform.size
        sides = (height, width) if size is None else (size, size)
        model = deepcopy(teacher.model).float()
        probed.append(_look(model, teacher.transform, (channels, *sides)))
    return mine, probed


@torch.no_grad()
def _look(model: nn.Module, transform: InputTransform, shape: tuple[int, int, int]) -> ProbedModel:
    pixels = torch.empty((_PROBED, *shape), device="meta")
    features = compute_features(model, deepcopy(transform).to("meta")(pixels))
    patches = features.patches
    grid = find_grid(patches.shape[1], *shape[1:]) if patches.ndim == 3 else None
    return ProbedModel(Embeddings(*features), grid)


def list_shapes(losses: LabelFreeLoss, teachers: list[ProbedModel]) -> list[FeatureShapes]:
    """Return for each teacher rows of an image and their width, by the kinds that terms read."""
    listed: list[FeatureShapes] = []
    for number, seen in enumerate(teachers):
        kinds = [of for of in (POOLED, PATCHES) if losses.wants(of, number)]
        shapes = {of: seen.embeddings.get(of).shape for of in kinds}
        listed.append({of: (shape[1:-1].numel(), shape[-1]) for of, shape in shapes.items()})
    return listed


def check_comparable(
    config: RunConfig, losses: LabelFreeLoss, student: ProbedModel, teachers: list[ProbedModel]
) -> None:
    """Refuse features that terms cannot compare: no vector for an image, or no grid of patches."""
    sides: list[tuple[str, str, ProbedModel, int | None]] = [
        ("model.name", config.model.name, student, None)
    ]
    sections = get_teacher_sections(config.distill)
    for number, (section, seen) in enumerate(zip(sections, teachers, strict=True)):
        sides.append(("distill.teacher", section.model or section.weights, seen, number))
    for key, name, seen, number in sides:
        if losses.wants(POOLED, number) and seen.embeddings.get(POOLED).ndim != 2:
            raise UserError(
                f"{key} {name!r} does not pool its features into one vector an image, which "
                "distill.losses of: pooled compare; give it a global_pool in its args, or compare "
                "patches"
            )
        if losses.wants(PATCHES, number) and (
            seen.grid is None or seen.embeddings.get(PATCHES).shape[1] == 1
        ):
            raise UserError(
                f"{key} {name!r} has no grid of patches for these images, which distill.losses "
                "of: patches compare; compare pooled features, or choose another model or size"
            )


def _check_terms(config: RunConfig, losses: LabelFreeLoss, shapes: ImageShapes) -> None:
    """Refuse terms of layers, or of patches whose grid changes."""
    for term in config.distill.losses:
        if term.layers:
            raise UserError(
                f"distill.losses: layers ({term.layers}) of {term.name} are not supported with "
                "train.task=distil; select its features by of: pooled or patches"
            )
    if losses.wants(PATCHES) and config.train.image_sizes:
        raise UserError(
            "train.image_sizes changes the student's grid of patches, which distill.losses of: "
            "patches compare; leave one of them out"
        )
    check_shapes(losses, shapes)


def check_shapes(losses: LabelFreeLoss, shapes: ImageShapes) -> None:
    """Refuse images of two sizes if patches are compared, whose grids are made once."""
    sizes = {shape for shape in shapes.values() if shape is not None}
    if losses.wants(PATCHES) and len(sizes) > 1:
        raise UserError(
            "data.train_pp and data.eval_pp give images of different sizes, but distill.losses of: "
            "patches compare grids of one; end both with the same size"
        )
