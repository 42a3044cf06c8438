"""Learning the features of other models, without labels and without a classifier."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from losses.base import LossOutput
from losses.label_free.objective import PATCHES, Embeddings, LabelFreeInputs
from models.factory import create_model
from models.teachers.embedding import (
    Embedded,
    Embedder,
    FeatureTeacher,
    create_feature_teachers,
    embed,
)
from models.teachers.teacher import get_teacher_sections
from models.transforms import to_pixels
from tasks.distil.check import (
    DistilCheck,
    DistilFacts,
    build_loss,
    check_shapes,
    check_sightings,
    create_loss_of,
    list_shapes,
    look_at,
    name_asked,
    take_stored,
)
from tasks.distil.feature_statistics import FeatureShapes, create_scalings
from tasks.distil.grids import GridChange
from tasks.evaluation.probing import Prober
from tasks.images.pixels import ImageTask, check_pairs
from tasks.images.resizing import resize_pixels
from tasks.protocol import Companion, SumBatches, SumOver
from tasks.teachers.cache.reader import get_stored_features
from tasks.teachers.cache.rows import Column
from tasks.teachers.teaching import TERM_SCALES, Teachers, list_names
from utils.errors import UserError
from utils.json_types import JsonMapping
from utils.metrics import Evaluation

if TYPE_CHECKING:
    from datasets import ImageBatch, Loader
    from engine import Plan, TrainState
    from utils.config.load import RunConfig
    from utils.runtime.base import Runtime

# Of a teacher's features over the evaluation split, as a share of their size: below it all images
# look alike to it.
_NO_SPREAD = 1e-6


class Distil(ImageTask):
    """A micro-batch on the device -> mixed images -> features of student and teachers -> one loss.

    Attributes:
      losses: terms and projectors, which are trained beside the student.
      feature_shapes: of each teacher, what terms look at; known once the student is prepared.
      teachers: in the order of the configuration.
    """

    score_name = "-loss"
    check = DistilCheck
    twin = "tasks.distil.synthetic:DistilTwin"

    def __init__(
        self, config: RunConfig, facts: DistilFacts, loaders: Mapping[str, Loader]
    ) -> None:
        super().__init__(config, facts, loaders)
        self.losses = create_loss_of(config)
        self.teaching = Teachers(config, self.losses)
        self._changes = nn.ModuleList()
        self._scalings = nn.ModuleList()
        self.feature_shapes: list[FeatureShapes] = []
        self._prober: Prober | None = None
        self._embedders: dict[nn.Module, nn.Module] = {}
        self.score_metric = config.distill.score
        self.score_name = config.distill.score or "-loss"

    # The engine's protocol.

    def loss(self, model: nn.Module, batch: ImageBatch) -> LossOutput:
        """The weighted terms between features of mixed images."""
        pixels = self.augment(batch.images, batch.draws)
        inputs = self.transform(resize_pixels(pixels, batch.values))
        return self.compare_features(model, inputs, pixels, batch)

    def compare_features(
        self, model: nn.Module, inputs: Tensor, pixels: Tensor, batch: ImageBatch
    ) -> LossOutput:
        """The terms between a student's features of its input and the teachers' of pixels."""
        seen = self._see(model, inputs)
        teachers = tuple(self.ask_all(pixels, batch))
        return self.losses(
            LabelFreeInputs(
                students=tuple(
                    Embeddings(seen.pooled, self._to_grid(seen.patches, number))
                    for number in range(len(teachers))
                ),
                teachers=teachers,
                mask=batch.mask,
                term_scales=batch.values.get(TERM_SCALES),
            )
        )

    def _see(self, model: nn.Module, inputs: Tensor) -> Embedded:
        """A model's features of its input, as the device makes them of those of the run."""
        embedder = self._embedders.get(model)
        return embed(model, inputs) if embedder is None else embedder(inputs)

    def ask(self, teacher: FeatureTeacher, pixels: Tensor) -> Embeddings:
        """A teacher's features, without a gradient."""
        return Embeddings(*teacher(pixels))

    def ask_all(self, pixels: Tensor, batch: ImageBatch) -> Iterator[Embeddings]:
        """Every teacher's features at the scale that is learnt, asked now or stored before."""
        stored = get_stored_features(batch)
        for number, (teacher, maps) in enumerate(zip(self.teachers, self._scalings, strict=True)):
            if stored:
                features = take_stored(self.teaching.cache.columns, stored, self._hashes[number])
            else:
                features = self.ask(teacher, pixels)
            yield replace(features, **{of: one(features.get(of)) for of, one in maps.items()})

    def _to_grid(self, patches: Tensor, teacher: int) -> Tensor | None:
        """The student's patches on a teacher's grid; none where no term looks at them."""
        return self._changes[teacher](patches) if self.losses.wants(PATCHES, teacher) else None

    def count(self, model: nn.Module, batch: ImageBatch) -> Tensor:
        """[2 + terms]: examples, and sums over them of the total and of each term."""
        pixels = to_pixels(batch.images)
        with _remembering_nothing(self.losses):
            found = self.compare_features(model, self.transform(pixels), pixels, batch)
        examples = batch.mask.float().sum()
        terms = [found.terms["total"], *(found.terms[one.name] for one in self.losses.terms)]
        sums = torch.stack([term.float() for term in terms]) * examples
        return torch.cat([examples.reshape(1), sums])

    def summarise(self, sums: Tensor) -> Evaluation:
        """`distil_loss`, each of its terms as `distil_loss/TERM`, `examples`.

        The score is the loss, negated.
        """
        examples, total, *terms = sums.tolist()
        share = 1.0 / max(examples, 1.0)
        metrics = {"distil_loss": total * share}
        for one, value in zip(self.losses.terms, terms, strict=True):
            metrics[f"distil_loss/{one.name}"] = value * share
        metrics["examples"] = examples
        return Evaluation(metrics, -metrics["distil_loss"])

    # Before the first step.

    def check_micro_batch(self, examples: int, devices: int) -> None:
        """As the check's."""
        check_pairs(self.config, examples, devices)

    def prepare(self, student: nn.Module) -> None:
        """Make projectors and changes of grids for the images that the run really sees."""
        config, shape = self.config, self._images["train"].image_shape
        shadow = create_model(config.model, **self.facts.model_arguments, device="meta")
        seen = look_at(shadow, self.create_shadows(), self.transform, shape)
        check_shapes(self.losses, {role: one.image_shape for role, one in self._images.items()})
        check_sightings(config, self.losses, *seen)
        build_loss(self.losses, *seen)
        mine, theirs = seen
        self.feature_shapes = list_shapes(self.losses, theirs)
        self._scalings = create_scalings(config, self.feature_shapes)
        self._changes.extend(
            GridChange(mine.grid, one.grid) if self.losses.wants(PATCHES, number) else nn.Identity()
            for number, one in enumerate(theirs)
        )

    def pool(self, model: nn.Module, batch: ImageBatch) -> Tensor:
        """A model's pooled features [B, C] of a device batch of evaluation."""
        return self._see(model, self.transform(to_pixels(batch.images))).pooled

    def to_device(self, runtime: Runtime) -> None:
        """Put what turns pixels into the student's input on the device, and what meets features."""
        self.transform.to(runtime.device)
        self._changes.to(runtime.device)
        self._scalings.to(runtime.device)
        self._prober = Prober(runtime, self.facts.sets, self.pool)

    def attach(self, runtime: Runtime, state: TrainState, plan: Plan, stream: JsonMapping) -> None:
        """Put the teachers on the device, and make ready the schedules of the terms' weights."""
        config = self.config
        self.teaching.plan_weights(plan)
        teachers = create_feature_teachers(config.distill, student_transform=self.transform)
        self.teaching.bring_own(runtime, teachers)
        for one in self.teachers:
            for seen in self._images.values():
                one.transform.expect(*seen.image_shape[:2], runtime.device)
        # A run's models are never called as a whole, which alone a runtime would compile.
        for model in (state.model, *state.averages.values()):
            self._embedders[model] = runtime.accelerate(Embedder(model))
        known = name_asked(config, self.facts.teachers)
        self.teaching.open_stored(runtime, stream, known, plan.total_steps)

    # For tools.

    def answer(self, model: nn.Module, inputs: Tensor) -> tuple[Tensor, ...]:
        """Pooled features and patches."""
        return tuple(embed(model, inputs))

    def list_companions(self, examples: int) -> list[Companion]:
        """Teachers like those in the step, each with images of its own size."""
        inputs = self.create_inputs(examples).to("meta")
        found = []
        for one in self.create_shadows():
            size = one.transform.size
            own = inputs if size is None else inputs.new_empty(*inputs.shape[:2], size, size)
            found.append(Companion(one.model.float(), own))
        return found

    def get_modules(self) -> dict[str, nn.Module]:
        """The teachers, what makes pixels the student's input, and what meets features."""
        own = {"grids": self._changes, "scalings": self._scalings}
        return {**super().get_modules(), **own}

    def pack_features(self, batch: ImageBatch) -> Tensor:
        """[B, F]: what `feature_shapes` lists of an image, one after the other, for statistics."""
        pixels = self.augment(batch.images, batch.draws)
        found = zip(self.ask_all(pixels, batch), self.feature_shapes, strict=True)
        return torch.cat([seen.get(of).flatten(1) for seen, kinds in found for of in kinds], dim=1)

    def ask_to_store(self, batch: ImageBatch, columns: Sequence[Column]) -> tuple[Tensor, ...]:
        """Features as the teachers give them, whatever scale they are learnt at."""
        pixels = self.augment(batch.images, batch.draws)
        found = {
            name: self.ask(teacher, pixels)
            for name, teacher in zip(self._hashes, self.teachers, strict=True)
        }
        return tuple(found[column.teacher].get(column.part) for column in columns)

    # Around the run.

    def judge_teachers(self, sum_over: SumOver) -> list[dict[str, float]]:
        """`features` of each teacher, and their `spread` between images as a share of their size.

        Raises:
          UserError: features that are not finite, or the same for all images.
        """
        found = []
        names = list_names(self.config.distill)
        for name, teacher in zip(names, self.teachers, strict=True):
            examples, *sums = sum_over(partial(self._count_teacher, teacher)).double().tolist()
            width = len(sums) // 2
            means = [value / max(examples, 1.0) for value in sums[:width]]
            squares = [value / max(examples, 1.0) for value in sums[width:]]
            size = sum(squares)
            varied = sum(max(s - m * m, 0.0) for s, m in zip(squares, means, strict=True))
            self._refuse_blind(name, size, varied)
            found.append({"features": float(width), "spread": (varied / size) ** 0.5})
        return found

    def _count_teacher(self, teacher: FeatureTeacher, batch: ImageBatch) -> Tensor:
        """[1 + 2 C]: examples, and sums of pooled features and of their squares."""
        pooled = teacher(to_pixels(batch.images)).pooled
        pooled = torch.where(batch.mask.unsqueeze(1), pooled, torch.zeros_like(pooled))
        sums = [pooled.sum(dim=0), pooled.square().sum(dim=0)]
        return torch.cat([batch.mask.float().sum().reshape(1), *sums])

    def _refuse_blind(self, name: str, size: float, varied: float) -> None:
        """Refuse a teacher that has nothing to tell."""
        if not torch.isfinite(torch.tensor([size, varied])).all():
            raise UserError(
                f"distill.teacher {name!r} gives features that are not finite on data.eval_split; "
                "check its weights, its mean and std, and its dtype"
            )
        if varied <= _NO_SPREAD * size and not self.config.distill.allow_weak_teacher:
            raise UserError(
                f"distill.teacher {name!r} gives all but the same features for every image of "
                "data.eval_split; check its weights, its mean and std, or set "
                "distill.allow_weak_teacher"
            )

    def judge(self, model: nn.Module, sum_over: SumBatches, number: int | None) -> dict[str, float]:
        """As `Prober.judge`, on the sets of data.evals."""
        return self._prober.judge(model, sum_over, number)

    def describe(self, metrics: Mapping[str, float]) -> str:
        """An evaluation's numbers, for a person."""
        terms = "".join(
            f", {name.partition('/')[2]} {value:.4f}"
            for name, value in metrics.items()
            if name.startswith("distil_loss/")
        )
        probes = "".join(
            f"; {name} {value:.2f}"
            for name, value in metrics.items()
            if name.endswith(("/knn", "/linear"))
        )
        return (
            f"loss {metrics['distil_loss']:.4f}{terms}, {metrics['examples']:.0f} examples{probes}"
        )

    @property
    def _hashes(self) -> list[str]:
        """Of the teachers alone."""
        return self.facts.teachers[: len(get_teacher_sections(self.config.distill))]

    def create_shadows(self) -> list[FeatureTeacher]:
        """The teachers on the meta device."""
        return create_feature_teachers(
            self.config.distill, student_transform=self.transform, device="meta"
        )


@contextlib.contextmanager
def _remembering_nothing(losses: nn.Module) -> Iterator[None]:
    """Around an evaluation, of which a loss keeps nothing."""
    was_training = losses.training
    losses.eval()
    yield
    losses.train(was_training)
