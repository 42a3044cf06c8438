"""Classification of images, with or without teachers.

Models give outputs and losses turn outputs into one number; they meet here, so that the engine
knows of neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from datasets import ImageBatch, Loader, require_images
from losses import (
    LossInputs,
    LossOutput,
    combine_answers,
    create_class_loss,
    create_weighted_loss,
)
from models import (
    EMA,
    Teacher,
    create_input_transform,
    create_model,
    create_teachers,
    get_teacher_sections,
)
from models.transforms import to_pixels
from tasks.classify_check import ClassifyCheck, ClassifyFacts, check_micro_batch
from tasks.classify_twin import ClassifyTwin
from tasks.counting import compute_ece, count_agreement, count_batch, count_marked
from tasks.dry_run import FeatureShapes, check_images, find_feature_shapes
from tasks.erasing import Erasing
from tasks.flops import count_flops
from tasks.judge.judge import Judge
from tasks.mixing import Mixing
from tasks.protocol import RunTask, SumBatches, SumOver
from tasks.resizing import Resizing, check_sizes, resize_pixels
from tasks.teacher_cache import (
    CacheShape,
    TeacherCache,
    get_stored_answers,
    open_cache,
    pack_answers,
)
from tasks.teaching import Teaching
from utils.errors import UserError
from utils.json_types import JsonMapping
from utils.log import get_logger
from utils.metrics import Evaluation

if TYPE_CHECKING:
    import numpy as np

    from engine import Plan, TrainState
    from utils.config import RunConfig
    from utils.runtime.base import Runtime

# Travels with a batch beside mixing coefficients: the teachers' own crops.
TEACHER_IMAGES = "teacher_images"


class Classify(RunTask):
    """A micro-batch on the device -> mixed images -> student and teachers -> one loss.

    Args:
      loaders: by role; `train` is missing where nothing is trained.

    Attributes:
      losses: what is trained beside the student.
      teaching: who teaches, and what is seen of it.
    """

    unit = ("img", 1)
    score_name = "top-1"
    check = ClassifyCheck
    twin = ClassifyTwin
    create_loss = staticmethod(create_class_loss)
    reads = frozenset({
        "distill", "data.train_pp", "data.eval_pp", "data.evals", "data.image_key",
        "data.label_key", "data.random_erasing",
        "model.num_classes", "model.image_size", "train.mixup_alpha",
        "train.cutmix_alpha", "train.mix_prob", "train.cutmix_prob", "train.label_smoothing",
        "train.task_loss", "train.task_loss_args", "train.mix_mode", "train.mix_off_epoch",
        "train.image_sizes",
        "data.repeats",
        "train.bce_threshold", "train.bce_sum", "train.bce_positive_weight", "train.class_weights",
        "model.head_init_scale", "model.head_init_bias",
    })  # fmt: skip

    def __init__(
        self, config: RunConfig, facts: ClassifyFacts, loaders: Mapping[str, Loader]
    ) -> None:
        self.config, self.facts, self._loaders = config, facts, loaders
        self._images = {
            role: require_images(loader.facts, config.data.source)
            for role, loader in loaders.items()
        }
        seen = self._images.get("train", self._images["eval"])
        self.transform = create_input_transform(*seen.normalisation, channels=seen.image_shape[2])
        steps_per_epoch = loaders["train"].batches_per_epoch if "train" in loaders else 0
        self.mixing = Mixing(config.train, steps_per_epoch)
        self.resizing = Resizing(config.train, seen.image_shape[0], steps_per_epoch)
        self.erasing = Erasing(config.data.random_erasing, config.train.seed)
        self.losses = create_weighted_loss(
            config.distill, self.create_loss(config.train, facts.num_classes)
        )
        self.teaching = Teaching(config, self.losses)
        self._cache: TeacherCache | None = None
        self._judge: Judge | None = None

    @property
    def teachers(self) -> list[Teacher]:
        """Those that run in the step; the student's average may be among them."""
        return self.teaching.teachers

    @property
    def own_teachers(self) -> list[Teacher]:
        """Those that have weights of their own."""
        return self.teaching.own

    @staticmethod
    def count_streams(config: RunConfig) -> int:
        """How many augmentations of the same examples a step needs."""
        return 2 if config.distill.views == "independent" else 1

    @staticmethod
    def count_graphs(config: RunConfig) -> int:
        """One for each side of the training images."""
        return max(1, len(set(config.train.image_sizes.values())))

    # The engine's protocol.

    def loss(self, model: nn.Module, batch: ImageBatch) -> LossOutput:
        """The weighted loss of student and teachers on mixed images."""
        pixels = self.augment(batch.images, batch.draws)
        outputs = model(self.transform(resize_pixels(pixels, batch.values)))
        logits, distill_logits = outputs if isinstance(outputs, tuple) else (outputs, None)
        inputs = LossInputs(
            student_logits=logits,
            targets=self.mixing.mix_targets(
                self.get_labels(batch), self.facts.num_classes, batch.draws
            ),
            labels=batch.labels,
            mask=batch.mask,
            teacher_logits=self.ask_teachers(pixels, batch),
            sparse_teacher=get_stored_answers(batch),
            student_distill_logits=distill_logits,
            example_indices=batch.indices,
            **self.teaching.take_seen(batch),
        )
        return self.losses(inputs)

    def get_labels(self, batch: ImageBatch) -> Tensor:
        """[B] classes, or [B, K] with a 1 for each of several."""
        return batch.labels

    def count(self, model: nn.Module, batch: ImageBatch) -> Tensor:
        """What `count_batch` sums of a model's answers to normalised images."""
        return self.count_marked(model, batch)[0]

    def count_marked(self, model: nn.Module, batch: ImageBatch) -> tuple[Tensor, Tensor]:
        """The same, and which examples the model names rightly."""
        return count_marked(self.predict(model, batch), batch)

    def summarise(self, sums: Tensor) -> Evaluation:
        """`top1` and `top5` in percent, `loss` in nats, `ece` (0 to 1), `examples` counted.

        The score is top-1.
        """
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

    # Before the first step.

    def check_micro_batch(self, examples: int, devices: int) -> None:
        """Refuse a number of examples that pairs or groups do not divide; see the function."""
        check_micro_batch(self.config, self.losses, examples, devices)

    def prepare(self, student: nn.Module) -> None:
        """Make what is trained beside the student, which learns whether it has a second head."""
        self.losses.build(*self._find_feature_shapes())
        if hasattr(student, "set_distilled_training"):
            student.set_distilled_training(self.losses.needs_distill_token())

    def to_device(self, runtime: Runtime) -> None:
        """Put what turns pixels into the student's input on the device; sets are read for it."""
        self.transform.to(runtime.device)
        facts = self.facts
        self._judge = Judge(runtime, facts.sets, facts.num_classes, self.config.train.seed)

    def attach(self, runtime: Runtime, state: TrainState, plan: Plan, stream: JsonMapping) -> None:
        """Put the live teachers on the device, or open their stored answers; set the taps."""
        config = self.config
        self.teaching.attach(state, plan)
        if config.distill.teacher_cache:
            shard = (runtime.ranks.index, runtime.ranks.size)
            self._cache = open_cache(
                config.distill, stream, self.facts.teachers, shard, plan.total_steps
            )
        else:
            teachers = create_teachers(
                config.distill, num_classes=self.facts.num_classes,
                student_transform=self.transform,
            )  # fmt: skip
            self.teaching.bring(
                runtime, teachers, state.ema,
                lambda model, weight: Teacher(model, self.transform, weight=weight),
            )  # fmt: skip

    def create_inputs(self, examples: int) -> Tensor:
        """Host inputs of the student, for a trace."""
        height, width, channels = self._images["train"].image_shape
        return torch.zeros(examples, channels, height, width)

    # For tools.

    def list_teachers(self, examples: int) -> list[tuple[nn.Module, Tensor]]:
        """Teachers like those in the step, each with images of its own size."""
        config, inputs = self.config, self.create_inputs(examples).to("meta")
        if config.distill.teacher_cache:
            return []
        found = []
        for one in self._create_shadows():
            size = one.transform.size
            own = inputs if size is None else inputs.new_empty(*inputs.shape[:2], size, size)
            found.append((one.model.float(), own))
        averages = [one for one in get_teacher_sections(config.distill) if one.model == EMA]
        for _ in averages:
            student = create_model(config.model, **self.facts.model_arguments, device="meta")
            found.append((student.eval(), inputs))
        return found

    def count_flops(self, model: nn.Module) -> float | None:
        """As they are counted op by op, without the device; none where steps are of many sizes."""
        if self.count_graphs(self.config) > 1:
            return None
        counted = count_flops(self.config, self.facts, self)
        return None if counted is None else counted["total"]

    def get_modules(self) -> dict[str, nn.Module]:
        """Teachers with weights of their own, and what makes pixels the student's input."""
        teachers = {f"teacher{n or ''}": one for n, one in enumerate(self.own_teachers)}
        return {**teachers, "transform": self.transform}

    def plan_plain_loss(self, batch: ImageBatch) -> Callable[[nn.Module], Tensor]:
        """Cross-entropy of images that are normalised already."""
        with torch.no_grad():
            inputs, labels = self.transform(to_pixels(batch.images)), batch.labels.long()
        return lambda model: nn.functional.cross_entropy(model(inputs), labels)

    # What travels with a batch.

    @property
    def stream_epochs(self) -> int | None:
        """Epochs after which the stream starts over; none: it never does."""
        return None if self._cache is None else self._cache.epochs

    def draw(self, step: int, batch: ImageBatch, *others: ImageBatch) -> ImageBatch:
        """A host batch with this rank's share of what is drawn and stored for its examples.

        Args:
          step: of the stream, which a cache may start over.
          others: the same examples, augmented otherwise.
        """
        drawn = self._sample(step)
        if self._cache is not None:
            drawn |= self._cache.read(step, batch.indices)
        for other in others:
            drawn[TEACHER_IMAGES] = other.images
        return replace(batch, draws={**batch.draws, **drawn})

    def get_values(self, step: int) -> dict[str, Tensor]:
        """Numbers of a step as a whole."""
        return self.teaching.get_values(step) | self.resizing.get_values(step)

    def list_later_forms(self, step: int, total_steps: int, batch: ImageBatch) -> list[ImageBatch]:
        """The batch for each other side that is still to come."""
        return self.resizing.list_later_forms(step, total_steps, batch)

    def close(self) -> None:
        """Let the stored answers and the sets go."""
        for opened in (self._cache, self._judge):
            if opened is not None:
                opened.close()

    # In the step.

    def augment(self, images: Tensor, draws: Mapping[str, Tensor]) -> Tensor:
        """uint8 [B, H, W, C] -> pixels [B, C, H, W] of 0..255, erased and then mixed."""
        pixels = self.erasing.erase_pixels(to_pixels(images), draws, self.transform.mean)
        return self.mixing.mix_pixels(pixels, draws)

    def ask_teachers(self, pixels: Tensor, batch: ImageBatch) -> tuple[Tensor, ...]:
        """Answers of the teachers to mixed pixels, or to their own crop of the same examples."""
        if TEACHER_IMAGES in batch.draws:
            pixels = self.augment(batch.draws[TEACHER_IMAGES], batch.draws)
        answers = self.teaching.ask(pixels)
        return combine_answers(answers, self.teaching.weights, self.config.distill.ensemble)

    def ask_to_store(self, batch: ImageBatch, top_k: int) -> Tensor:
        """Logits [B, K] of the teachers, as one answer."""
        return self.ask_teachers(self.augment(batch.images, batch.draws), batch)[0]

    def pack_stored(self, answers: Tensor, shape: CacheShape, examples: Tensor) -> np.ndarray:
        """The k best classes of logits."""
        return pack_answers(answers, shape, examples)

    def predict(self, model: nn.Module, batch: ImageBatch) -> Tensor:
        """Logits [B, K] of a device batch of evaluation."""
        return model(self.transform(to_pixels(batch.images)))

    # Around the run.

    def describe(self, metrics: Mapping[str, float]) -> str:
        """An evaluation's numbers, for a person."""
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

    def judge_teachers(self, sum_over: SumOver) -> list[dict[str, float]]:
        """Metrics of the teachers on the evaluation split, before the run begins.

        Raises:
          UserError: a teacher knows nothing, or answers what is no number.
        """
        found = []
        for name, teacher in self.teaching.iterate_own():
            evaluation = self.summarise(sum_over(partial(_count_teacher, teacher)))
            self._refuse_weak(evaluation, name)
            found.append(evaluation.metrics)
        return found

    def judge(self, model: nn.Module, sum_over: SumBatches, number: int | None) -> dict[str, float]:
        """As `Judge.judge`, on the sets of data.evals."""
        return self._judge.judge(self.predict, model, sum_over, number)

    def compare(self, model: nn.Module, sum_over: SumOver) -> dict[str, float]:
        """Percent of the evaluation split on which the model names each teacher's class."""
        found = {}
        for number, teacher in enumerate(self.own_teachers):
            name = "agreement" if number == 0 else f"agreement_{number + 1}"
            same, examples = sum_over(partial(self._count_agreement, model, teacher)).tolist()
            found[name] = 100.0 * same / max(examples, 1.0)
        return found

    def _sample(self, step: int) -> dict[str, Tensor]:
        """This rank's share of what is drawn on the host for a step."""
        loader = self._loaders["train"]
        size, image_size = loader.global_batch_size, self._images["train"].image_shape[:2]
        drawn: dict[str, Tensor] = {}
        for kind in (self.mixing, self.erasing):
            if kind.active:
                drawn |= kind.sample(step, size, image_size)
        start = loader.shard[0] * loader.rank_batch_size
        block = slice(start, start + loader.rank_batch_size)
        return {name: value[block] for name, value in drawn.items()}

    def _count_agreement(self, model: nn.Module, teacher: Teacher, batch: ImageBatch) -> Tensor:
        answers = teacher(to_pixels(batch.images))
        return count_agreement(self.predict(model, batch), answers, batch.mask)

    def _refuse_weak(self, evaluation: Evaluation, name: str) -> None:
        split, top1 = self.config.data.eval_split, evaluation.metrics["top1"]
        if not evaluation.is_finite:
            raise UserError(
                f"distill.teacher {name!r} gives answers that are not finite on data.eval_split; "
                "check its weights, its mean and std, and its dtype"
            )
        get_logger().info("teacher top-1 %.2f on %s", top1, split)
        chance = 1.0 / self.facts.num_classes
        spread = (chance * (1 - chance) / max(evaluation.metrics["examples"], 1)) ** 0.5
        limit = 100 * (chance + 3 * spread)
        if top1 <= limit and not self.config.distill.allow_weak_teacher:
            raise UserError(
                f"distill.teacher has top-1 {top1:.2f} on data.eval_split, no better than chance "
                f"({limit:.2f}); check its weights and the preprocessing, or set "
                "distill.allow_weak_teacher"
            )

    def _create_shadows(self) -> list[Teacher]:
        """The teachers on the meta device."""
        return create_teachers(
            self.config.distill,
            num_classes=self.facts.num_classes,
            student_transform=self.transform,
            device="meta",
        )

    def _find_feature_shapes(self) -> FeatureShapes:
        """Of the layers that losses look at; tries what only the run's own images could tell."""
        shapes = {role: images.image_shape for role, images in self._images.items()}
        is_known = shapes == dict(self.facts.image_shapes)
        if is_known and self.facts.feature_shapes is not None:
            return self.facts.feature_shapes
        if is_known and not self.losses.student_layers() and not self.losses.teacher_layers():
            return {}, {}
        config = self.config
        student = create_model(config.model, **self.facts.model_arguments, device="meta")
        teachers = self._create_shadows()
        if not is_known:
            live: Sequence[Teacher] = [] if config.distill.teacher_cache else teachers
            check_images(config, student, list(live), shapes)
            check_sizes(config, student, self.losses, shapes["train"])
        return find_feature_shapes(student, teachers, self.losses, shapes["train"])


def _count_teacher(teacher: Teacher, batch: ImageBatch) -> Tensor:
    """What `count_batch` sums of a teacher, which sees the images in its own way."""
    return count_batch(teacher(to_pixels(batch.images)), batch)
