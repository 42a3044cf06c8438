"""What can be found wrong with learning features before a device is touched."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from big_vision.input.images.labelled import require_images
from datasets import describe_dataset
from losses.label_free.objective import PATCHES, POOLED, Embeddings, create_label_free_loss
from models.teachers.embedding import (
    FeatureTeacher,
    create_feature_teachers,
    embed,
    find_grid,
    require_features,
)
from models.teachers.teacher import get_teacher_sections
from models.transforms import InputTransform
from tasks.distil.feature_statistics import FeatureShapes, create_scalings, open_statistics
from tasks.distil.grids import Grid
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
from tasks.teachers.cache.rows import FEATURES, AnswerForm, Column
from tasks.teachers.taught import TaughtCheck
from tasks.teachers.teaching import list_hashes
from utils.errors import UserError
from utils.json_types import JsonObject

if TYPE_CHECKING:
    from losses.label_free.objective import LabelFreeLoss
    from utils.config.load import RunConfig

_PROBED = 2  # examples


@dataclass(frozen=True, kw_only=True)
class DistilFacts(TaskFacts):
    """What is known of a student that learns features.

    Args:
      image_shapes: (H, W, C) of the images by role, as the strings tell; None: only a run can.
      sets: labelled ones that features are probed on.
      forms: what terms look at of each teacher; empty: only a run can tell.
    """

    image_shapes: ImageShapes
    sets: tuple[ProbedSet, ...] = ()
    forms: tuple[AnswerForm, ...] = ()

    @property
    def answers(self) -> tuple[AnswerForm, ...]:
        """Features of the kinds that terms look at."""
        if not self.forms:
            raise UserError(
                "data.train_pp does not tell the size of the images, on which the features to "
                "store depend; end it with a resize or crop to one size"
            )
        return self.forms


@dataclass(frozen=True)
class Sighting:
    """What a model makes of images of one shape, found on the meta device.

    Args:
      embeddings: of a few examples.
      grid: of the patches; none: they make no grid.
    """

    embeddings: Embeddings
    grid: Grid | None


class DistilCheck(TaughtCheck):
    """Looks at a configuration, then at student and teachers on the meta device.

    Raises:
      UserError: the first thing that is wrong.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        if not get_teacher_sections(config.distill):
            raise UserError(
                "train.task=distil learns from teachers alone, and there is none; set "
                "distill.teacher or distill.teachers, and distill.losses (--kd cosine)"
            )
        if config.run.eval_only:
            raise UserError(
                "run.eval_only has nothing to judge train.task=distil by: projectors are not "
                "exported; judge its features by python -m tools.evaluate RUN --probes knn linear"
            )
        check_strings(config)
        self.dataset = describe_dataset(config.data, config.model.known_sizes)
        for role in ("train", "eval"):
            require_images(self.dataset.examples[role], config.data.source)
        self.model_arguments, self.stream = {"num_classes": 0}, {}
        self._statistics = open_statistics(config)
        self.losses = create_loss_of(config)
        self._shapes: ImageShapes = {}
        self._sets: tuple[ProbedSet, ...] = ()
        self._forms: tuple[AnswerForm, ...] = ()

    @cached_property
    def teachers(self) -> list[str]:
        """Hashes of the teachers, whose weights are read for them, and of their statistics."""
        found = list_hashes(self.config.distill)
        return found if self._statistics is None else [*found, self._statistics.checksum[:16]]

    def check_micro_batch(self, examples: int, devices: int) -> None:
        """Refuse a number of examples that pairs do not divide."""
        check_pairs(self.config, examples, devices)

    def dry_run(self, student: nn.Module) -> None:
        """Try images, teachers and terms on a student on the meta device."""
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
        self._sets = check_probed_sets(config.data, student, student.num_features)
        if config.distill.score:
            check_score(config.distill.score, self._sets)
        if self._shapes["train"] is not None:
            seen = look_at(student, teachers, transform, self._shapes["train"])
            check_sightings(config, self.losses, *seen)
            with torch.device("meta"):
                build_loss(self.losses, *seen)
            _try_losses(self.losses, seen[1])
            shapes = list_shapes(self.losses, seen[1])
            create_scalings(config, shapes)
            self._forms = tuple(
                AnswerForm(FEATURES, width, rows if of == PATCHES else 0, of, number)
                for number, kinds in enumerate(shapes)
                for of, (rows, width) in kinds.items()
            )

    def find_facts(self) -> DistilFacts:
        """All that was found, once the student has been tried."""
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
        """Refuse sides without a step, and stored features of another stream or kind."""
        distill = self.config.distill
        if distill.teacher_cache:
            known = name_asked(self.config, self.teachers)
            cache = open_cache(distill, stream, known, (0, 1), total_steps)
            _check_parts(self._forms, cache.columns, known, distill.teacher_cache)
        steps = self.dataset.num_examples["train"] // self.config.data.global_batch_size
        check_begins(self.config.train, steps, total_steps)


def name_asked(config: RunConfig, teachers: list[str]) -> list[str]:
    """The teachers' hashes as a cache knows them, without those of their statistics."""
    count = len(get_teacher_sections(config.distill))
    return teachers[: count + (count > 1)]


def take_stored(columns: Sequence[Column], stored: Sequence[Tensor], teacher: str) -> Embeddings:
    """One teacher's features of those that a batch carries.

    Args:
      stored: of each column, in its order.
      teacher: its hash.
    """
    own = {
        column.part: features
        for column, features in zip(columns, stored, strict=True)
        if column.teacher == teacher
    }
    return Embeddings(own.get(POOLED), own.get(PATCHES))


def _check_parts(
    forms: Sequence[AnswerForm], columns: Sequence[Column], teachers: list[str], place: str
) -> None:
    """Refuse a cache without the features that terms look at."""
    there = {(one.teacher, one.part, one.width, one.places) for one in columns}
    for form in forms:
        if (teachers[form.teacher], form.part, form.width, form.places) not in there:
            raise UserError(
                f"distill.teacher_cache ({place!r}) has no {form.part} features of teacher number "
                f"{form.teacher + 1}, which distill.losses compare; store them with these losses "
                "by python -m tools.cache write"
            )


def create_loss_of(config: RunConfig) -> LabelFreeLoss:
    """The terms of a run."""
    return create_label_free_loss(config.distill, get_teacher_sections(config.distill))


def look_at(
    student: nn.Module,
    teachers: list[FeatureTeacher],
    transform: InputTransform,
    image_shape: tuple[int, int, int],
) -> tuple[Sighting, list[Sighting]]:
    """What student and teachers, on the meta device, make of images.

    Args:
      image_shape: (H, W, C).
    """
    height, width, channels = image_shape
    mine = _look(student.eval(), transform, (channels, height, width))
    found = []
    for one in teachers:
        size = one.transform.size
        sides = (height, width) if size is None else (size, size)
        found.append(_look(deepcopy(one.model).float(), one.transform, (channels, *sides)))
    return mine, found


@torch.no_grad()
def _look(model: nn.Module, transform: InputTransform, shape: tuple[int, int, int]) -> Sighting:
    pixels = torch.empty((_PROBED, *shape), device="meta")
    found = embed(model, deepcopy(transform).to("meta")(pixels))
    grid = find_grid(found.patches.shape[1], *shape[1:]) if found.patches.ndim == 3 else None
    return Sighting(Embeddings(*found), grid)


def list_shapes(losses: LabelFreeLoss, teachers: list[Sighting]) -> list[FeatureShapes]:
    """Of each teacher rows of an image and their width, by the kinds that terms look at."""
    found: list[FeatureShapes] = []
    for number, seen in enumerate(teachers):
        kinds = [of for of in (POOLED, PATCHES) if losses.wants(of, number)]
        shapes = {of: seen.embeddings.get(of).shape for of in kinds}
        found.append({of: (shape[1:-1].numel(), shape[-1]) for of, shape in shapes.items()})
    return found


def build_loss(losses: LabelFreeLoss, student: Sighting, teachers: list[Sighting]) -> None:
    """Make projectors for what was seen."""
    losses.build(student.embeddings, [one.embeddings for one in teachers])


def check_sightings(
    config: RunConfig, losses: LabelFreeLoss, student: Sighting, teachers: list[Sighting]
) -> None:
    """Refuse features that terms cannot compare.

    Raises:
      UserError: no vector for an image, or patches that make no grid.
    """
    names = [one.model or one.weights for one in get_teacher_sections(config.distill)]
    sides = [("model.name", config.model.name, student, None)]
    sides += [
        ("distill.teacher", name, one, number)
        for number, (name, one) in enumerate(zip(names, teachers, strict=True))
    ]
    for key, name, seen, number in sides:
        if losses.wants(POOLED, number) and seen.embeddings.pooled.ndim != 2:
            raise UserError(
                f"{key} {name!r} does not pool its features into one vector an image, which "
                "distill.losses of: pooled compare; give it a global_pool in its args, or compare "
                "patches"
            )
        if losses.wants(PATCHES, number) and (
            seen.grid is None or seen.embeddings.patches.shape[1] == 1
        ):
            raise UserError(
                f"{key} {name!r} has no grid of patches for these images, which distill.losses "
                "of: patches compare; compare pooled features, or choose another model or size"
            )


def _check_terms(config: RunConfig, losses: LabelFreeLoss, shapes: ImageShapes) -> None:
    """Refuse what a term cannot be: of layers, or of patches whose grid changes."""
    for term in config.distill.losses:
        if term.layers:
            raise UserError(
                f"distill.losses: {term.name} has layers ({term.layers}), which means nothing to "
                "train.task=distil; name what it compares by of: pooled or patches"
            )
    if losses.wants(PATCHES) and config.train.image_sizes:
        raise UserError(
            "train.image_sizes changes the student's grid of patches, which distill.losses of: "
            "patches compare; leave one of them out"
        )
    check_shapes(losses, shapes)


def check_shapes(losses: LabelFreeLoss, shapes: ImageShapes) -> None:
    """Refuse images of two sizes where patches are compared, whose grids are made once."""
    sizes = {shape for shape in shapes.values() if shape is not None}
    if losses.wants(PATCHES) and len(sizes) > 1:
        raise UserError(
            "data.train_pp and data.eval_pp give images of different sizes, but distill.losses of: "
            "patches compare grids of one; end both with the same size"
        )


def _try_losses(losses: LabelFreeLoss, teachers: list[Sighting]) -> None:
    """Ask each loss for its value on the meta device: it refuses what it cannot use."""
    for spec, loss in zip(losses.terms, losses.losses, strict=True):
        features = teachers[spec.teacher].embeddings.get(spec.of)
        # A copy: what a loss remembers belongs to the run. Autocast does not know meta.
        deepcopy(loss).to("meta").compute(features, features, None)
