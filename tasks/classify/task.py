"""Classification of images, with or without teachers.

Models compute outputs, and losses turn them into one number. This module connects the two, so that
the engine depends on neither.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from datasets import ImageBatch
from losses.base import LossInputs, LossOutput
from losses.logits.ensembles import combine_answers
from losses.tasks.classes import create_class_loss
from losses.weighted import WeightedLoss, create_weighted_loss
from models.factory import create_model
from models.teachers.kept_tokens import ClassTokenScores
from models.teachers.teacher import StudentView, Teacher, create_teachers, get_teacher_sections
from models.transforms import to_pixels
from tasks.classify.built_students import reuse_classifier
from tasks.classify.check import (
    ClassifyCheck,
    ClassifyFacts,
    CreateLoss,
    check_micro_batch,
    set_class_weights,
)
from tasks.classify.counting import (
    compute_ece,
    count_agreement,
    count_batch,
    count_with_correctness,
)
from tasks.classify.mutual import SELF, create_peer, learn_together
from tasks.classify.rotations import TURNS, check_rotations, split_turned, turn_pixels
from tasks.classify.views import STRONG_IMAGES, TEACHER_IMAGES, get_view_name
from tasks.evaluation.evaluator import SetEvaluator
from tasks.images.dry_run import check_images, find_feature_shapes
from tasks.images.pixels import ImageTask
from tasks.images.resizing import check_sizes, get_only_side, resize_pixels
from tasks.protocol import Companion, SumBatches, SumOver
from tasks.teachers.cache.reader import combine_stored, get_stored_answers
from tasks.teachers.cache.rows import Columns, condense_answers
from tasks.teachers.dry_run import FeatureShapes
from tasks.teachers.taught import Worth, set_distilled_training
from tasks.teachers.teaching import Teaching
from utils.json_types import JsonMapping
from utils.metrics import Evaluation

if TYPE_CHECKING:
    from engine import Plan, TrainState
    from tasks.protocol import Loaders
    from utils.config.load import RunConfig
    from utils.runtime.base import Runtime


class Classify(ImageTask[Teacher]):
    """A micro-batch on the device -> mixed images -> student and teachers -> one loss."""

    score_name = "top-1"
    score_metric = ""
    hint = "its weights, its mean and std, and its dtype"
    check = ClassifyCheck
    synthetic = "tasks.classify.synthetic:SyntheticClassify"
    create_loss: CreateLoss = staticmethod(create_class_loss)
    facts: ClassifyFacts
    losses: WeightedLoss
    teaching: Teaching[Teacher]

    def __init__(self, config: RunConfig, facts: ClassifyFacts, loaders: Loaders) -> None:
        super().__init__(config, facts, loaders)
        section = set_class_weights(config.train, facts.class_weights)
        self.losses = create_weighted_loss(
            config.distill, self.create_loss(section, facts.num_classes)
        )
        self.teaching = Teaching(config, self.losses)
        self._attention: ClassTokenScores | None = None
        self._evaluator: SetEvaluator | None = None

    def loss(self, model: nn.Module, batch: ImageBatch) -> LossOutput:
        strong = self._see_strong(model, batch)  # before the weak view, whose layers taps keep
        pixels = self.augment(batch.images, batch.draws)
        is_turned = self.config.distill.views == "rotations"
        pixels = turn_pixels(pixels) if is_turned else pixels
        logits, distill_logits = self._ask_student(model, pixels, batch)
        stored, only_stored = combine_stored(
            get_stored_answers(batch), self.facts.num_classes, *self.teaching.get_ensemble()
        )
        inputs = LossInputs(
            student_logits=logits,
            targets=self.mixing.mix_targets(
                self.get_labels(batch), self.facts.num_classes, batch.draws
            ),
            labels=batch.labels,
            mask=batch.mask,
            teacher_logits=stored or self.compute_teacher_outputs(pixels, batch),
            sparse_teacher=only_stored,
            student_distill_logits=distill_logits,
            example_indices=batch.indices,
            **strong,
            **self.teaching.take_seen(batch),
        )
        if is_turned:
            inputs = split_turned(inputs)
        if self.config.distill.peer:
            peer = model if self.losses.peer is None else self.losses.peer
            return learn_together(self.losses, inputs, self._ask_student(peer, pixels, batch)[0])
        return self.losses(inputs)

    def get_labels(self, batch: ImageBatch) -> Tensor:
        """Return the classes [B], or [B, K] with a 1 for each of several classes."""
        return batch.labels

    def count(self, model: nn.Module, batch: ImageBatch) -> Tensor:
        return self.count_with_correctness(model, batch)[0]

    def count_with_correctness(
        self, model: nn.Module, batch: ImageBatch
    ) -> tuple[Tensor, Tensor | None]:
        return count_with_correctness(self.predict(model, batch), batch)

    def summarise(self, sums: Tensor) -> Evaluation:
        """Return `top1` and `top5` in percent, `loss` in nats, `ece` (0 to 1), `examples`."""
        top1, top5, loss, examples = sums[:4].tolist()
        share = 1.0 / max(examples, 1.0)
        metrics = {
            "top1": 100.0 * top1 * share,
            "top5": 100.0 * top5 * share,
            "loss": loss * share,
            "ece": compute_ece(sums[4:]),
            "examples": examples,
        }
        return Evaluation(metrics, metrics["top1"])

    def check_micro_batch(self, examples: int, devices: int) -> None:
        check_micro_batch(self.config, self.losses, examples, devices)

    def prepare(self, student: nn.Module) -> None:
        self.losses.build(*self._find_feature_shapes())
        shape = self._images["train"].known_shape
        check_rotations(self.config, self.losses, {"train": shape})
        names = self.facts.class_names
        reuse_classifier(self.config, student, self.losses, self.transform, shape, names)
        self.losses.peer = create_peer(self.config, self.facts.num_classes)
        set_distilled_training(student, self.losses.needs_distill_token())

    def to_device(self, runtime: Runtime) -> None:
        self.transform.to(runtime.device)
        facts = self.facts
        self._evaluator = SetEvaluator(
            runtime, facts.sets, facts.num_classes, self.config.train.seed
        )

    def attach(self, runtime: Runtime, state: TrainState, plan: Plan, stream: JsonMapping) -> None:
        self.teaching.open(self, runtime, state, plan, stream)
        if any(teacher.keep_tokens for teacher in get_teacher_sections(self.config.distill)):
            self._attention = ClassTokenScores(state.model, self.config.model.name)

    def wrap(self, model: nn.Module, weight: float) -> Teacher:
        """Make a teacher of the student, for images of the student's size if that never changes."""
        follows = get_only_side(self.config.train.image_sizes) is not None
        return Teacher(model, self.transform, weight=weight, follows=follows)

    def forward_for_tracing(self, model: nn.Module, inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        distill = self.config.distill
        is_twice = distill.views == "weak_strong" or distill.peer == SELF
        if distill.views == "rotations":
            inputs = inputs.repeat_interleave(TURNS, dim=0)
        answers = [model(inputs) for _ in range(1 + is_twice)]
        heads = [output if isinstance(output, tuple) else (output,) for output in answers]
        return tuple(itertools.chain.from_iterable(heads))

    def list_companions(self, examples: int) -> list[Companion]:
        config, inputs = self.config, self.create_inputs(examples).to("meta")
        peer = create_peer(config, self.facts.num_classes, "meta")
        models = [] if peer is None else [Companion(peer.train(), inputs, is_trained=True)]
        if config.distill.teacher_cache:
            return models
        for teacher in self.create_teachers("meta"):
            size = teacher.transform.size
            if teacher.kept is not None:
                teacher.kept.choose_first(examples, "meta")
            crop = inputs.shape[2:] if teacher.follows else self._images["train"].known_shape[:2]
            own = inputs.new_empty(*inputs.shape[:2], *(crop if size is None else (size, size)))
            models.append(Companion(teacher.model.float(), own))
        return models + [Companion(student, inputs) for student in self.create_selves()]

    def create_supervised_loss(self, batch: ImageBatch) -> Callable[[nn.Module], Tensor]:
        with torch.no_grad():
            inputs, labels = self.transform(to_pixels(batch.images)), batch.labels.long()
        return lambda model: nn.functional.cross_entropy(model(inputs), labels)

    def draw(self, step: int, batch: ImageBatch, *others: ImageBatch) -> ImageBatch:
        batch = super().draw(step, batch)
        views = {get_view_name(self.config): other.images for other in others}
        return replace(batch, draws={**batch.draws, **views}) if views else batch

    def close(self) -> None:
        super().close()
        if self._evaluator is not None:
            self._evaluator.close()

    def compute_teacher_outputs(self, pixels: Tensor, batch: ImageBatch) -> tuple[Tensor, ...]:
        """Return the teachers' logits of mixed pixels, or of their own crops of the examples."""
        if TEACHER_IMAGES in batch.draws:
            pixels = self.augment(batch.draws[TEACHER_IMAGES], batch.draws)
        return self._ask_live(pixels, batch)

    def compute_cached_outputs(self, batch: ImageBatch, columns: Columns) -> tuple[Tensor, ...]:
        """Return each teacher's k most probable classes with their log-probabilities."""
        answers = self.teaching.ask(self.augment(batch.images, batch.draws))
        pairs = zip(answers, columns, strict=True)
        return tuple(condense_answers(answer, column.top_k) for answer, column in pairs)

    def predict(self, model: nn.Module, batch: ImageBatch) -> Tensor:
        """Return logits [B, K] of a device batch of evaluation."""
        return model(self.transform(to_pixels(batch.images)))

    def describe(self, metrics: Mapping[str, float]) -> str:
        sets = "".join(
            f"; {name.removesuffix('/top1')} {value:.2f}"
            for name, value in metrics.items()
            if name.endswith("/top1")
        )
        return (
            f"top-1 {metrics['top1']:.2f}, top-5 {metrics['top5']:.2f}, loss "
            f"{metrics['loss']:.4f}, ECE {metrics['ece']:.4f}, {metrics['examples']:.0f} examples"
            f"{sets}"
        )

    def count_teacher(self, teacher: Teacher, batch: ImageBatch) -> Tensor:
        """Return the sums of `count_batch` for a teacher, which has a transform of its own."""
        return count_batch(teacher(to_pixels(batch.images)), batch)

    def rate_teacher(self, metrics: dict[str, float]) -> Worth:
        top1, chance = metrics["top1"], 1.0 / self.facts.num_classes
        spread = (chance * (1 - chance) / max(metrics["examples"], 1)) ** 0.5
        limit = 100 * (chance + 3 * spread)
        advice = "its weights and the preprocessing"
        return Worth(f"top-1 {top1:.2f}", top1 <= limit, f"chance ({limit:.2f})", advice)

    def evaluate_extra_sets(
        self, model: nn.Module, sum_over: SumBatches, number: int | None
    ) -> dict[str, float]:
        assert self._evaluator is not None
        return self._evaluator.evaluate_extra_sets(self.predict, model, sum_over, number)

    def compare(self, model: nn.Module, sum_over: SumOver) -> dict[str, float]:
        """Return the percentage of the evaluation split with the same class as each teacher."""
        count = partial(self._count_agreement, model)
        metrics = self.teaching.compare_own("agreement", sum_over, count, scale=100.0)
        if self.losses.peer is not None:
            peer = Teacher(self.losses.peer, self.transform)  # frozen: its training has ended
            metrics["peer_top1"] = self.summarise(sum_over(partial(self.count_teacher, peer))).score
        return metrics

    def _ask_student(
        self, model: nn.Module, pixels: Tensor, batch: ImageBatch
    ) -> tuple[Tensor, Tensor | None]:
        """Return logits of mixed pixels, and those of a distillation token, if any."""
        outputs = model(self.transform(resize_pixels(pixels, batch.values)))
        return outputs if isinstance(outputs, tuple) else (outputs, None)

    def _ask_live(self, pixels: Tensor, batch: ImageBatch) -> tuple[Tensor, ...]:
        """Return the live teachers' logits; keep_tokens uses the student's attention."""
        scores = None if self._attention is None else self._attention.take()
        seen = StudentView(resize_pixels(pixels, batch.values), scores)
        answers = self.teaching.ask(pixels, seen)
        return combine_answers(answers, *self.teaching.get_ensemble())

    def _see_strong(self, model: nn.Module, batch: ImageBatch) -> dict[str, Any]:
        """Return the strong views' fields of `LossInputs`, mixed and erased like the weak views."""
        if STRONG_IMAGES not in batch.draws:
            return {}
        pixels = self.augment(batch.draws[STRONG_IMAGES], batch.draws)
        return {
            "strong_student_logits": self._ask_student(model, pixels, batch)[0],
            "strong_teacher_logits": self._ask_live(pixels, batch),
        }

    def _count_agreement(self, model: nn.Module, teacher: Teacher, batch: ImageBatch) -> Tensor:
        answers = teacher(to_pixels(batch.images))
        return count_agreement(self.predict(model, batch), answers, batch.mask)

    def create_teachers(self, device: str = "cpu") -> list[Teacher]:
        facts, transform = self.facts, self.transform
        return create_teachers(
            self.config.distill,
            num_classes=facts.num_classes,
            class_names=facts.class_names,
            student_transform=transform,
            device=device,
        )

    def _find_feature_shapes(self) -> FeatureShapes:
        """Find the shapes of the layers that losses read, by trial where the checks could not."""
        shapes = {role: images.known_shape for role, images in self._images.items()}
        is_known = shapes == dict(self.facts.image_shapes)
        if is_known and self.facts.feature_shapes is not None:
            return self.facts.feature_shapes
        if is_known and not self.losses.student_layers() and not self.losses.teacher_layers():
            return {}, {}
        config = self.config
        student = create_model(config.model, **self.facts.model_arguments, device="meta")
        teachers = self.create_teachers("meta")
        if not is_known:
            check_images(config, student, [] if config.distill.teacher_cache else teachers, shapes)
            check_sizes(config, student, self.losses, shapes["train"])
        side = get_only_side(config.train.image_sizes)
        return find_feature_shapes(student, teachers, self.losses, shapes["train"], side)
