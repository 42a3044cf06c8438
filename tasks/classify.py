"""Classification of images, with or without teachers: a batch becomes a loss.

Models give outputs and losses turn outputs into one number; they meet here, so that the engine
knows of neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from datasets import ImageBatch, Loader
from losses import LossInputs, LossOutput, Objective, SparseTeacher
from models import FeatureTap, Teacher, View, combine_answers
from models.views import to_pixels
from tasks.erasing import Erasing
from tasks.mixing import Mixing
from tasks.teacher_cache import INDICES, LOG_PROBS, RESIDUAL

if TYPE_CHECKING:
    from utils.config import RunConfig

# Names of what travels with a batch beside mixing coefficients.
TEACHER_IMAGES, TERM_SCALES = "teacher_images", "term_scales"


class Classify:
    """A micro-batch on the device -> mixed images -> student and teachers -> one loss."""

    def __init__(self, view: View, config: RunConfig, losses: Objective, classes: int) -> None:
        self.view = view
        self.mixing = Mixing(config.train)
        self.erasing = Erasing(config.data.random_erasing, config.train.seed)
        self.losses = losses
        self.num_classes = classes
        self.ensemble = config.distill.ensemble
        self.teachers: list[Teacher] = []
        self.student_tap: FeatureTap | None = None
        self.teacher_tap: FeatureTap | None = None

    def __call__(self, model: nn.Module, batch: ImageBatch) -> LossOutput:
        pixels = self.augment(batch.images, batch.draws)
        outputs = model(self.view(pixels))
        logits, distill_logits = outputs if isinstance(outputs, tuple) else (outputs, None)
        inputs = LossInputs(
            student_logits=logits,
            targets=self.mixing.mix_targets(batch.labels, self.num_classes, batch.draws),
            labels=batch.labels,
            mask=batch.mask,
            teacher_logits=self.ask_teachers(pixels, batch),
            sparse_teacher=_get_stored_answers(batch),
            student_distill_logits=distill_logits,
            student_features=self.student_tap.take() if self.student_tap else {},
            teacher_features=self.teacher_tap.take() if self.teacher_tap else {},
            example_indices=batch.indices,
            term_scales=batch.values.get(TERM_SCALES),
        )
        return self.losses(inputs)

    def augment(self, images: Tensor, draws: Mapping[str, Tensor]) -> Tensor:
        """uint8 [B, H, W, C] -> pixels [B, C, H, W] of 0..255, erased and then mixed."""
        pixels = self.erasing.erase_pixels(to_pixels(images), draws, self.view.mean)
        return self.mixing.mix_pixels(pixels, draws)

    def sample(self, step: int, loader: Loader) -> dict[str, Tensor]:
        """This rank's share of what is drawn on the host for a step."""
        size, image_size = loader.global_batch_size, loader.facts.image_shape[:2]
        drawn: dict[str, Tensor] = {}
        for kind in (self.mixing, self.erasing):
            if kind.active:
                drawn |= kind.sample(step, size, image_size)
        start = loader.shard[0] * loader.rank_batch_size
        block = slice(start, start + loader.rank_batch_size)
        return {name: value[block] for name, value in drawn.items()}

    def ask_teachers(self, pixels: Tensor, batch: ImageBatch) -> tuple[Tensor, ...]:
        """Answers of the teachers to mixed pixels, or to their own view of the same examples."""
        if TEACHER_IMAGES in batch.draws:
            pixels = self.augment(batch.draws[TEACHER_IMAGES], batch.draws)
        answers = [teacher(pixels) for teacher in self.teachers]
        weights = [teacher.weight for teacher in self.teachers]
        return combine_answers(answers, weights, self.ensemble)


def predict(view: View, model: nn.Module, batch: ImageBatch) -> Tensor:
    """Logits [B, K] of a device batch of evaluation."""
    return model(view(to_pixels(batch.images)))


def ask_teacher(teacher: Teacher, batch: ImageBatch) -> Tensor:
    """A teacher's logits [B, K] of a device batch of evaluation, through its own view."""
    return teacher(to_pixels(batch.images))


def _get_stored_answers(batch: ImageBatch) -> SparseTeacher | None:
    if LOG_PROBS not in batch.draws:
        return None
    return SparseTeacher(*(batch.draws[name] for name in (LOG_PROBS, INDICES, RESIDUAL)))
