"""Distillation of other models' features, without labels and without a classifier."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from losses.base import LossOutput
from losses.label_free.objective import PATCHES, Embeddings, LabelFreeInputs, LabelFreeLoss
from models.factory import create_model
from models.teachers.embedding import (
    FeatureExtractor,
    FeatureTeacher,
    ImageFeatures,
    compute_features,
    create_feature_teachers,
)
from models.teachers.teacher import get_teacher_sections
from models.transforms import create_resampler, resample, to_pixels
from tasks.distil.check import (
    DistilCheck,
    DistilFacts,
    Grid,
    check_comparable,
    check_shapes,
    create_loss_of,
    list_cached_hashes,
    list_shapes,
    look_at,
    take_stored,
)
from tasks.distil.feature_statistics import FeatureShapes, create_scalings
from tasks.evaluation.probing import Prober
from tasks.images.pixels import ImageTask, check_pairs
from tasks.images.resizing import resize_pixels
from tasks.protocol import Companion, SumBatches, SumOver
from tasks.teachers.cache.reader import get_stored_features
from tasks.teachers.cache.rows import Columns
from tasks.teachers.teaching import TERM_SCALES, Teachers, list_names
from utils.errors import UserError
from utils.json_types import JsonMapping
from utils.metrics import Evaluation
from utils.torch_types import ModuleListOf

if TYPE_CHECKING:
    from datasets import ImageBatch
    from engine import Plan, TrainState
    from tasks.protocol import Loaders
    from utils.config.load import RunConfig
    from utils.runtime.base import Runtime


class GridChange(nn.Module):
    """Patches [B, N, C] of one grid -> those of another, bilinear with antialiasing.

    torch's operator for it has no lowering to XLA and would run on the host.
    """

    axis0: Tensor
    axis1: Tensor

    def __init__(self, grid: Grid | None, target: Grid | None) -> None:
        super().__init__()
        assert grid is not None and target is not None  # `check_comparable` has refused it
        self.grid, self.is_needed = grid, grid != target
        for axis, (size, wanted) in enumerate(zip(grid, target, strict=True)):
            self.register_buffer(f"axis{axis}", create_resampler(size, wanted), persistent=False)

    def forward(self, patches: Tensor) -> Tensor:
        """Return [B, M, C], float32 where the grids differ."""
        if not self.is_needed:
            return patches
        maps = patches.float().transpose(1, 2).unflatten(2, self.grid)
        return resample(maps, self.axis0, self.axis1).flatten(2).transpose(1, 2)


# Of a teacher's features over the evaluation split, as a share of their size: below it all images
# look alike to it.
_NO_SPREAD = 1e-6


class Distil(ImageTask[FeatureTeacher]):
    """A micro-batch on the device -> mixed images -> features of student and teachers -> one loss.

    `losses` are terms and projectors; `feature_shapes`, set by `prepare`, what terms read of
    teachers.
    """

    score_name = "-loss"
    check = DistilCheck
    synthetic = "tasks.distil.synthetic:SyntheticDistil"
    facts: DistilFacts
    losses: LabelFreeLoss

    def __init__(self, config: RunConfig, facts: DistilFacts, loaders: Loaders) -> None:
        super().__init__(config, facts, loaders)
        self.losses = create_loss_of(config)
        self._hashes = facts.teachers[: len(get_teacher_sections(config.distill))]
        self.teaching = Teachers(config, self.losses)
        self._changes: ModuleListOf[nn.Module] = ModuleListOf()
        self._scalings: ModuleListOf[nn.ModuleDict] = ModuleListOf()
        self.feature_shapes: list[FeatureShapes] = []
        self._prober: Prober | None = None
        self._embedders: dict[nn.Module, nn.Module] = {}
        self.score_metric = config.distill.score
        self.score_name = config.distill.score or "-loss"

    def loss(self, model: nn.Module, batch: ImageBatch) -> LossOutput:
        pixels = self.augment(batch.images, batch.draws)
        inputs = self.transform(resize_pixels(pixels, batch.values))
        return self.compare_features(model, inputs, pixels, batch)

    def compare_features(
        self, model: nn.Module, inputs: Tensor, pixels: Tensor, batch: ImageBatch
    ) -> LossOutput:
        """Return the terms between a student's features of its input and those of the teachers."""
        seen = self._see(model, inputs)
        teachers = tuple(self.iterate_teacher_outputs(pixels, batch))
        students = tuple(
            Embeddings(
                seen.pooled, change(seen.patches) if self.losses.wants(PATCHES, number) else None
            )
            for number, change in enumerate(self._changes)
        )
        scales = batch.values.get(TERM_SCALES)
        return self.losses(LabelFreeInputs(students, teachers, batch.mask, scales))

    def _see(self, model: nn.Module, inputs: Tensor) -> ImageFeatures:
        """Return a model's features of its input, by its compiled extractor if it has one."""
        embedder = self._embedders.get(model)
        return compute_features(model, inputs) if embedder is None else embedder(inputs)

    def iterate_teacher_outputs(self, pixels: Tensor, batch: ImageBatch) -> Iterator[Embeddings]:
        """Yield every teacher's features at the scale that is learnt, computed now or stored."""
        stored = get_stored_features(batch)
        for number, (teacher, maps) in enumerate(zip(self.teachers, self._scalings, strict=True)):
            if stored:
                assert self.teaching.cache is not None
                features = take_stored(self.teaching.cache.columns, stored, self._hashes[number])
            else:
                features = Embeddings(*teacher(pixels))
            scaled = {of: scaling(features.get(of)) for of, scaling in maps.items()}
            yield replace(features, **scaled)

    def count(self, model: nn.Module, batch: ImageBatch) -> Tensor:
        """Return [2 + terms]: examples, and sums over them of the total and of each term."""
        pixels = to_pixels(batch.images)
        was_training = self.losses.training
        self.losses.eval()  # a loss with a memory must not remember an evaluation
        terms = self.compare_features(model, self.transform(pixels), pixels, batch).terms
        self.losses.train(was_training)
        examples = batch.mask.float().sum()
        terms = [terms["total"], *(terms[term.name] for term in self.losses.terms)]
        sums = torch.stack([term.float() for term in terms]) * examples
        return torch.cat([examples.reshape(1), sums])

    def summarise(self, sums: Tensor) -> Evaluation:
        """Return `distil_loss`, its terms as `distil_loss/TERM`, `examples`; the score is -loss."""
        examples, total, *terms = sums.tolist()
        share = 1.0 / max(examples, 1.0)
        metrics = {"distil_loss": total * share}
        for term, value in zip(self.losses.terms, terms, strict=True):
            metrics[f"distil_loss/{term.name}"] = value * share
        metrics["examples"] = examples
        return Evaluation(metrics, -metrics["distil_loss"])

    def check_micro_batch(self, examples: int, devices: int) -> None:
        check_pairs(self.config, examples, devices)

    def prepare(self, student: nn.Module) -> None:
        config, shape = self.config, self._images["train"].known_shape
        shadow = create_model(config.model, **self.facts.model_arguments, device="meta")
        mine, theirs = look_at(shadow, self.create_teachers("meta"), self.transform, shape)
        shapes = {role: images.known_shape for role, images in self._images.items()}
        check_shapes(self.losses, shapes)
        check_comparable(config, self.losses, mine, theirs)
        self.losses.build(mine.embeddings, [seen.embeddings for seen in theirs])
        self.feature_shapes = list_shapes(self.losses, theirs)
        self._scalings = create_scalings(config, self.feature_shapes)
        self._changes.extend(
            GridChange(mine.grid, seen.grid) if self.losses.wants(PATCHES, n) else nn.Identity()
            for n, seen in enumerate(theirs)
        )

    def pool(self, model: nn.Module, batch: ImageBatch) -> Tensor:
        """Return a model's pooled features [B, C] of a device batch of evaluation."""
        return self._see(model, self.transform(to_pixels(batch.images))).pooled

    def to_device(self, runtime: Runtime) -> None:
        self.transform.to(runtime.device)
        self._changes.to(runtime.device)
        self._scalings.to(runtime.device)
        self._prober = Prober(runtime, self.facts.sets, self.pool)

    def attach(self, runtime: Runtime, state: TrainState, plan: Plan, stream: JsonMapping) -> None:
        config = self.config
        self.teaching.plan_weights(plan)
        self.teaching.bring_own(runtime, self.create_teachers())
        for teacher in self.teachers:
            for images in self._images.values():
                teacher.transform.expect(*images.known_shape[:2], runtime.device)
        # A runtime compiles calls of whole models; here only their features are computed.
        for model in (state.model, *state.averages.values()):
            self._embedders[model] = runtime.accelerate(FeatureExtractor(model))
        known = list_cached_hashes(config, self.facts.teachers)
        self.teaching.open_stored(runtime, stream, known, plan.total_steps)

    def forward_for_tracing(self, model: nn.Module, inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(compute_features(model, inputs))

    def list_companions(self, examples: int) -> list[Companion]:
        inputs = self.create_inputs(examples).to("meta")
        companions = []
        for teacher in self.create_teachers("meta"):
            size = teacher.transform.size
            own = inputs if size is None else inputs.new_empty(*inputs.shape[:2], size, size)
            companions.append(Companion(teacher.model.float(), own))
        return companions

    def get_modules(self) -> dict[str, nn.Module]:
        return super().get_modules() | {"grids": self._changes, "scalings": self._scalings}

    def pack_features(self, batch: ImageBatch) -> Tensor:
        """Return [B, F], what `feature_shapes` lists of an image, concatenated, for statistics."""
        pixels = self.augment(batch.images, batch.draws)
        pairs = zip(self.iterate_teacher_outputs(pixels, batch), self.feature_shapes, strict=True)
        return torch.cat([seen.get(of).flatten(1) for seen, kinds in pairs for of in kinds], dim=1)

    def compute_cached_outputs(self, batch: ImageBatch, columns: Columns) -> tuple[Tensor, ...]:
        """Return features as the teachers give them, whatever scale they are learnt at."""
        pixels = self.augment(batch.images, batch.draws)
        pairs = zip(self._hashes, self.teachers, strict=True)
        features = {name: Embeddings(*teacher(pixels)) for name, teacher in pairs}
        return tuple(features[column.teacher].get(column.part) for column in columns)

    def evaluate_teachers(self, sum_over: SumOver) -> list[dict[str, float]]:
        """Return each teacher's `features`, and `spread` between images, as a share of their size.

        UserError for features that are not finite, or the same for all images.
        """
        metrics = []
        for name, teacher in zip(list_names(self.config.distill), self.teachers, strict=True):
            examples, *sums = sum_over(partial(self._count_teacher, teacher)).double().tolist()
            width = len(sums) // 2
            means = [value / max(examples, 1.0) for value in sums[:width]]
            squares = [value / max(examples, 1.0) for value in sums[width:]]
            size = sum(squares)
            varied = sum(max(s - m * m, 0.0) for s, m in zip(squares, means, strict=True))
            if not (math.isfinite(size) and math.isfinite(varied)):
                raise UserError(
                    f"distill.teacher {name!r} gives features that are not finite on "
                    "data.eval_split; check its weights, its mean and std, and its dtype"
                )
            if varied <= _NO_SPREAD * size and not self.config.distill.allow_weak_teacher:
                raise UserError(
                    f"distill.teacher {name!r} gives all but the same features for every image of "
                    "data.eval_split; check its weights, its mean and std, or set "
                    "distill.allow_weak_teacher"
                )
            metrics.append({"features": float(width), "spread": (varied / size) ** 0.5})
        return metrics

    def _count_teacher(self, teacher: FeatureTeacher, batch: ImageBatch) -> Tensor:
        """Return [1 + 2 C]: examples, and sums of pooled features and of their squares."""
        pooled = teacher(to_pixels(batch.images)).pooled
        pooled = torch.where(batch.mask.unsqueeze(1), pooled, torch.zeros_like(pooled))
        sums = [pooled.sum(dim=0), pooled.square().sum(dim=0)]
        return torch.cat([batch.mask.float().sum().reshape(1), *sums])

    def evaluate_extra_sets(
        self, model: nn.Module, sum_over: SumBatches, number: int | None
    ) -> dict[str, float]:
        assert self._prober is not None
        return self._prober.evaluate_extra_sets(model, sum_over, number)

    def describe(self, metrics: Mapping[str, float]) -> str:
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

    def create_teachers(self, device: str = "cpu") -> list[FeatureTeacher]:
        return create_feature_teachers(
            self.config.distill, student_transform=self.transform, device=device
        )
