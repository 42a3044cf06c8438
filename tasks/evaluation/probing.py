"""Judges features by what simple readers make of them on labelled sets, beside an evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from big_vision.input.images.labelled import require_images
from datasets import create_loader, create_source
from tasks.evaluation.features import gather_features
from tasks.evaluation.fewshot import judge_few_shots, judge_least_squares
from tasks.evaluation.judge import check_model_takes
from tasks.evaluation.neighbours import judge_neighbours
from tasks.evaluation.sets import SetSpec, change_data, plan_sets
from utils.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from datasets import ImageBatch
    from tasks.evaluation.features import Features
    from tasks.protocol import SumBatches
    from utils.config.data import DataSection
    from utils.runtime.base import Runtime

# Neighbours that vote, as DINO counts them; fewer where there are not as many examples.
NEIGHBOURS = 20
READERS = ("knn", "linear", "fewshot")
# Numbers of a table of features that is added up on the device.
_MOST_NUMBERS = 1 << 27
_NOT_READ = ("classes", "class_map")


@dataclass(frozen=True)
class ProbedSet:
    """A labelled set: readers learn from one split of it and are judged on another.

    Args:
      spec: with the split that they are judged on as its evaluation split.
      bank: the same with the split that they learn from.
      num_classes: of the labels.
    """

    spec: SetSpec
    bank: DataSection
    num_classes: int


def check_probed_sets(data: DataSection, student: nn.Module, width: int) -> tuple[ProbedSet, ...]:
    """The sets of data.evals as their metadata tell them.

    Args:
      student: on the meta device.
      width: of its features.

    Raises:
      UserError: a set is missing, has no labels of one class each, or is too large.
    """
    for one in data.evals:
        for key in _NOT_READ:
            value = getattr(one, key)
            if value != type(one).model_fields[key].default:
                raise UserError(
                    f"data.evals {one.name!r} has {key} ({value!r}), which means nothing to "
                    "features: readers learn the classes of the set itself; leave it out"
                )
    banks = {one.name: one.bank for one in data.evals}
    specs = plan_sets(data, data.evals, "data.evals")
    return tuple(_look_at(one, banks[one.group] or data.train_split, student, width)
                 for one in specs)  # fmt: skip


def check_score(score: str, sets: tuple[ProbedSet, ...]) -> None:
    """Refuse a score that no evaluation gives.

    Raises:
      UserError: no such set or reader, or a set that not every evaluation judges.
    """
    name, _, reader = score.rpartition("/")
    found = next((one for one in sets if one.spec.name == name), None)
    if found is None or reader.partition("_")[0] not in READERS:
        known = [f"{one.spec.name}/knn" for one in sets]
        raise UserError(
            f"distill.score ({score!r}) is no probe of data.evals; give NAME/knn, NAME/linear or "
            f"NAME/fewshot_N of one of its sets{', as ' + known[0] if known else ''}"
        )
    if found.spec.every != 1:
        raise UserError(
            f"distill.score ({score!r}) is of a set that is judged at every {found.spec.every}th "
            "evaluation, but each needs a score; leave its every out"
        )


class Prober:
    """Readers of a run's labelled sets; each pass opens its files anew.

    Args:
      ask: a model's features [B, D] of a batch on the device.
    """

    def __init__(
        self,
        runtime: Runtime,
        sets: tuple[ProbedSet, ...],
        ask: Callable[[nn.Module, ImageBatch], Tensor],
    ) -> None:
        self._runtime, self._sets, self._ask = runtime, sets, ask

    def judge(self, model: nn.Module, sum_over: SumBatches, number: int | None) -> dict[str, float]:
        """`NAME/knn`, `NAME/linear` and `NAME/fewshot_N` in percent of the sets that are due.

        Args:
          number: of the run's evaluation, from 1; none: the last one, at which all are due.
        """
        was_training = model.training
        model.eval()
        found: dict[str, float] = {}
        for one in self._sets:
            if number is None or number % one.spec.every == 0:
                metrics = self._judge(one, model, sum_over)
                found |= {f"{one.spec.name}/{name}": value for name, value in metrics.items()}
        model.train(was_training)
        return found

    def _judge(self, one: ProbedSet, model: nn.Module, sum_over: SumBatches) -> dict[str, float]:
        train, test = (
            self._gather(data, one.num_classes, model, sum_over)
            for data in (one.bank, one.spec.data)
        )
        if not (np.isfinite(train.values).all() and np.isfinite(test.values).all()):
            return dict.fromkeys(("knn", "linear"), math.nan)
        count = min(NEIGHBOURS, len(train.labels))
        near = judge_neighbours(self._runtime, sum_over, train, test, (count,))
        shots = judge_few_shots(train, test)
        return {
            "knn": near[count],
            "linear": judge_least_squares(train, test),
            **{f"fewshot_{each}": sum(seeds) / len(seeds) for each, seeds in shots.items()},
        }

    def _gather(
        self, data: DataSection, classes: int, model: nn.Module, sum_over: SumBatches
    ) -> Features:
        shard = (self._runtime.ranks.index, self._runtime.ranks.size)
        loader = create_loader(data, "eval", seed=0, shard=shard)
        try:
            return gather_features(lambda batch: self._ask(model, batch), loader, sum_over, classes)
        finally:
            loader.close()


def _look_at(spec: SetSpec, bank: str, student: nn.Module, width: int) -> ProbedSet:
    sides = (spec.data, change_data(spec.data, eval_split=bank))
    classes = []
    for data in sides:
        try:
            source = create_source(data)
            selection = source.select("eval")
            facts = require_images(source.describe(selection, "eval"), data.source)
        except UserError as error:
            raise UserError(f"{spec.key} {spec.name!r}: {error}") from error
        if facts.several_labels:
            raise UserError(
                f"{spec.key} {spec.name!r} has lists of labels, but probes read one class each; "
                "name another label_key"
            )
        if selection.num_examples * (width + 2) > _MOST_NUMBERS:
            raise UserError(
                f"{spec.key} {spec.name!r}: {selection.num_examples} examples of "
                f"{data.eval_split} with {width} features are too many to probe in a run; take a "
                "slice of the split, or judge the export by python -m tools.evaluate --probes"
            )
        check_model_takes(spec, facts.image_shape, student)
        classes.append(facts.num_classes)
    return ProbedSet(spec, sides[1], max(classes))
