"""Judges a model on sets of images: in a run beside its evaluations, and for tools."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from big_vision.input.batches import RIGHT
from big_vision.pp.device_ops import require_range
from datasets import Loader, create_loader
from models.transforms import create_input_transform
from tasks.evaluation.corrupted import compute_corruption_errors, compute_mce
from tasks.evaluation.counts import ALLOWED, count_set, restrict
from tasks.evaluation.sets import JudgedSet, ModelClasses, SetSpec, look_at_sets, plan_sets
from tasks.evaluation.verdict import SetVerdict, summarise_set
from tasks.images.dry_run import find_fault
from utils.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from datasets import ImageBatch
    from tasks.protocol import SumBatches
    from utils.config.data import DataSection
    from utils.runtime.base import Runtime

# A model's answers to a batch: logits [B, K].
Predict = Callable[[nn.Module, "ImageBatch"], "Tensor"]


class OpenSet:
    """A set that is read: batches whose labels are the model's classes.

    Args:
      shown: what the metadata told of it.
      classes: of the model.
    """

    def __init__(self, runtime: Runtime, shown: JudgedSet, classes: int, seed: int) -> None:
        self.shown, self._classes = shown, classes
        shard = (runtime.ranks.index, runtime.ranks.size)
        known = {"num_classes": len(shown.to_model)}  # of the set, where it does not tell
        self.loader: Loader = create_loader(
            shown.spec.data, "eval", seed=seed, shard=shard, known=known
        )
        self._allowed = self._find_allowed(runtime)

    @property
    def num_competing(self) -> int:
        """Classes that an answer is chosen from."""
        return int(self._allowed.sum())

    def batches(self) -> Iterator[ImageBatch]:
        """One pass: this rank's share of each example once, padded and masked."""
        values = {ALLOWED: self._allowed}
        for batch in self.loader.batches():
            labels, right = self._translate(batch)
            mask = batch.mask & (right.amax(dim=1) > 0)
            draws = {**batch.draws, RIGHT: right}
            yield replace(batch, labels=labels, mask=mask, draws=draws, values=values)

    def _translate(self, batch: ImageBatch) -> tuple[Tensor, Tensor]:
        """Labels [B] int32 and right answers [B, K], in the model's classes."""
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
        """[K] float32: 1 for classes that compete."""
        allowed = torch.zeros(self._classes)
        if self.shown.spec.classes == "all":
            return allowed + 1.0
        if self.shown.spec.classes == "named":
            allowed[self.shown.to_model[self.shown.to_model >= 0]] = 1.0
            return allowed
        for batch in self.loader.batches():
            _, right = self._translate(batch)
            allowed = torch.maximum(allowed, right[batch.mask].sum(0).clamp(max=1.0))
        return torch.from_numpy(np.max(runtime.ranks.gather(allowed.numpy()), axis=0))


class Judge:
    """The sets of a run or a tool; each is opened when it is first judged, and stays open.

    Args:
      seed: of the loaders, which draw nothing.
    """

    def __init__(
        self, runtime: Runtime, sets: Sequence[JudgedSet], classes: int, seed: int = 0
    ) -> None:
        self.sets, self._runtime, self._classes, self._seed = sets, runtime, classes, seed
        self._open: dict[str, OpenSet] = {}

    def judge(
        self, predict: Predict, model: nn.Module, sum_over: SumBatches, number: int | None
    ) -> dict[str, float]:
        """Metrics of the sets that are due, `NAME/top1` and so on; mCE where ImageNet-C is whole.

        Args:
          sum_over: goes over batches and adds up what is counted of them.
          number: of the run's evaluation, from 1; none: the last one, at which all are due.
        """
        due = [one for one in self.sets if number is None or number % one.spec.every == 0]
        count = partial(_count, predict, model)
        was_training = model.training
        model.eval()
        found = {
            one.spec.name: summarise_set(
                sum_over(count, self.open(one).batches()), self._classes, several=one.several
            )
            for one in due
        }
        model.train(was_training)
        return name_metrics(due, found)

    def open(self, shown: JudgedSet) -> OpenSet:
        """The set, ready to be read."""
        name = shown.spec.name
        if name not in self._open:
            self._open[name] = OpenSet(self._runtime, shown, self._classes, self._seed)
        return self._open[name]

    def close(self) -> None:
        """Let the files go."""
        for one in self._open.values():
            one.loader.close()


def check_sets(
    data: DataSection, classes: ModelClasses, student: nn.Module
) -> tuple[JudgedSet, ...]:
    """The sets of data.evals as their metadata tell them.

    Args:
      student: on the meta device.

    Raises:
      UserError: a set is missing, its labels mean nothing to the model, or its images do not fit.
    """
    specs = plan_sets(data, data.evals, "data.evals")
    sets = look_at_sets(specs, classes, data.eval_pp)
    for one in sets:
        check_model_takes(one.spec, one.image_shape, student)
    return sets


def check_model_takes(spec: SetSpec, shape: tuple[int, int, int] | None, model: nn.Module) -> None:
    """Refuse a set whose images a model on the meta device does not take.

    Args:
      shape: (H, W, C) of the images; none: only a loader can tell.

    Raises:
      UserError: with the model's reason.
    """
    if shape is None:
        return
    normalisation = require_range(spec.data.eval_pp, "data.eval_pp").normalisation
    transform = create_input_transform(*normalisation, channels=shape[2]).to("meta")
    reason = find_fault(model.eval(), transform, shape)
    if reason:
        raise UserError(
            f"{spec.key} {spec.name!r} gives images of {' x '.join(map(str, shape))}, which the "
            f"model does not take: {reason}; give it a pp that makes images of the model's size"
        )


def name_metrics(sets: Sequence[JudgedSet], verdicts: dict[str, SetVerdict]) -> dict[str, float]:
    """`NAME/METRIC` of each set; of a group of corruptions their means and mCE alone."""
    found: dict[str, float] = {}
    groups = dict.fromkeys(one.spec.group for one in sets)
    for group in groups:
        members = [one for one in sets if one.spec.group == group]
        metrics = [verdicts[one.spec.name].metrics for one in members]
        if members[0].spec.corruption is None:
            found |= {f"{group}/{name}": value for name, value in metrics[0].items()}
            continue
        found[f"{group}/top1"] = sum(one["top1"] for one in metrics) / len(metrics)
        mce = compute_mce(find_corruption_errors(members, verdicts))
        if mce is not None:
            found[f"{group}/mce"] = mce
    return found


def find_corruption_errors(
    members: Sequence[JudgedSet], verdicts: dict[str, SetVerdict]
) -> dict[str, float]:
    """Of the corruptions of a group, in percent of AlexNet's."""
    top1 = {one.spec.corruption: verdicts[one.spec.name].metrics["top1"] for one in members}
    return compute_corruption_errors(top1)


def _count(predict: Predict, model: nn.Module, batch: ImageBatch) -> Tensor:
    return count_set(restrict(predict(model, batch), batch), batch)
