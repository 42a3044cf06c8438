"""Evaluation of a model on sets of images: in a run beside its evaluations, and for tools."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from big_vision.input.batches import RIGHT
from big_vision.pp.device_ops import require_range
from datasets import ImageBatch, Loader, create_loader
from models.transforms import create_input_transform
from tasks.evaluation.counts import ALLOWED, SetResult, count_set, restrict, summarise_set
from tasks.evaluation.sets import (
    EvaluatedSet,
    ModelClasses,
    SetSpec,
    compute_corruption_errors,
    compute_mce,
    describe_sets,
    plan_sets,
)
from tasks.images.dry_run import explain_rejection
from utils.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from tasks.protocol import SumBatches
    from utils.config.data import DataSection
    from utils.runtime.base import Runtime

# A model's answers to a batch: logits [B, K].
Predict = Callable[[nn.Module, "ImageBatch"], "Tensor"]


class OpenSet:
    """A set that is read: batches whose labels are the model's classes."""

    def __init__(self, runtime: Runtime, shown: EvaluatedSet, classes: int, seed: int) -> None:
        self.shown, self._classes = shown, classes
        shard = (runtime.ranks.index, runtime.ranks.size)
        known = {"num_classes": len(shown.to_model)}  # of the set, if its metadata has none
        data = shown.spec.data
        self.loader: Loader = create_loader(data, "eval", seed=seed, shard=shard, known=known)
        self._allowed = self._find_allowed(runtime)

    @property
    def num_competing(self) -> int:
        return int(self._allowed.sum())

    def batches(self) -> Iterator[ImageBatch]:
        """Yield this rank's share of each example once, padded and masked."""
        values = {ALLOWED: self._allowed}
        for batch in self._read():
            labels, right = self._translate(batch)
            mask = batch.mask & (right.amax(dim=1) > 0)
            draws = {**batch.draws, RIGHT: right}
            yield replace(batch, labels=labels, mask=mask, draws=draws, values=values)

    def _read(self) -> Iterator[ImageBatch]:
        for batch in self.loader.batches():
            assert isinstance(batch, ImageBatch)
            yield batch

    def _translate(self, batch: ImageBatch) -> tuple[Tensor, Tensor]:
        """Return labels [B] int32 and correct outputs [B, K], in the model's classes."""
        to_model = torch.from_numpy(self.shown.to_model)
        if RIGHT not in batch.draws:
            labels = to_model[batch.labels.long()]
            numbers = torch.arange(self._classes)
            right = (labels.unsqueeze(1) == numbers).float()
            return labels.clamp(min=0).int(), right
        there = to_model >= 0
        right = torch.zeros(len(batch), self._classes)
        # Several of the set's classes may be one of the model's.
        right.index_add_(1, to_model[there], batch.draws[RIGHT][:, there]).clamp_(max=1.0)
        return right.argmax(dim=1).int(), right

    def _find_allowed(self, runtime: Runtime) -> Tensor:
        """Return [K] float32: 1 for classes that compete."""
        allowed = torch.zeros(self._classes)
        if self.shown.spec.classes == "all":
            return allowed + 1.0
        if self.shown.spec.classes == "named":
            allowed[self.shown.to_model[self.shown.to_model >= 0]] = 1.0
            return allowed
        for batch in self._read():
            _, right = self._translate(batch)
            allowed = torch.maximum(allowed, right[batch.mask].sum(0).clamp(max=1.0))
        return torch.from_numpy(np.max(runtime.ranks.gather(allowed.numpy()), axis=0))


class SetEvaluator:
    """The sets of a run or a tool; each is opened at its first evaluation, and stays open."""

    def __init__(
        self, runtime: Runtime, sets: Sequence[EvaluatedSet], classes: int, seed: int = 0
    ) -> None:
        self.sets, self._runtime, self._classes, self._seed = sets, runtime, classes, seed
        self._open: dict[str, OpenSet] = {}

    def evaluate_extra_sets(
        self, predict: Predict, model: nn.Module, sum_over: SumBatches, number: int | None
    ) -> dict[str, float]:
        """Return metrics of the sets that are due, `NAME/top1` and so on; mCE if complete.

        `number` is that of the run's evaluation, from 1; None for the last one: all are due.
        """
        due = [shown for shown in self.sets if number is None or number % shown.spec.every == 0]

        def count(batch: ImageBatch) -> Tensor:
            return count_set(restrict(predict(model, batch), batch), batch)

        was_training = model.training
        model.eval()
        verdicts = {}
        for shown in due:
            sums = sum_over(count, self.open(shown).batches())
            verdicts[shown.spec.name] = summarise_set(sums, self._classes, several=shown.several)
        model.train(was_training)
        return name_metrics(due, verdicts)

    def open(self, shown: EvaluatedSet) -> OpenSet:
        name = shown.spec.name
        if name not in self._open:
            self._open[name] = OpenSet(self._runtime, shown, self._classes, self._seed)
        return self._open[name]

    def close(self) -> None:
        for opened in self._open.values():
            opened.loader.close()


def check_sets(
    data: DataSection, classes: ModelClasses, student: nn.Module
) -> tuple[EvaluatedSet, ...]:
    """Return the sets of data.evals by their metadata, each tried on a student on meta."""
    specs = plan_sets(data, data.evals, "data.evals")
    sets = describe_sets(specs, classes, data.eval_pp)
    for shown in sets:
        check_model_takes(shown.spec, shown.image_shape, student)
    return sets


def check_model_takes(spec: SetSpec, shape: tuple[int, int, int] | None, model: nn.Module) -> None:
    """Refuse a set of images (H, W, C) that a model on the meta device does not take."""
    if shape is None:
        return
    normalisation = require_range(spec.data.eval_pp, "data.eval_pp").normalisation
    transform = create_input_transform(*normalisation, channels=shape[2]).to("meta")
    reason = explain_rejection(model.eval(), transform, shape)
    if reason:
        raise UserError(
            f"{spec.key} {spec.name!r} gives images of {' x '.join(map(str, shape))}, which the "
            f"model does not take: {reason}; give it a pp that makes images of the model's size"
        )


def name_metrics(sets: Sequence[EvaluatedSet], verdicts: dict[str, SetResult]) -> dict[str, float]:
    """Return `NAME/METRIC` of each set; of a group of corruptions their means and mCE alone."""
    metrics: dict[str, float] = {}
    for group in dict.fromkeys(shown.spec.group for shown in sets):
        specs = [shown.spec for shown in sets if shown.spec.group == group]
        if specs[0].corruption is None:
            own = verdicts[specs[0].name].metrics
            metrics |= {f"{group}/{name}": value for name, value in own.items()}
            continue
        top1 = {
            spec.corruption: verdicts[spec.name].metrics["top1"]
            for spec in specs
            if spec.corruption is not None
        }
        metrics[f"{group}/top1"] = sum(top1.values()) / len(top1)
        mce = compute_mce(compute_corruption_errors(top1))
        if mce is not None:
            metrics[f"{group}/mce"] = mce
    return metrics
