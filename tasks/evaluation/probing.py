"""Evaluation of features by probes on labelled sets, beside an evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from big_vision.input.images.labelled import ImageFacts
from big_vision.input.source import require_facts
from datasets import create_loader, create_source
from tasks.evaluation.evaluator import check_model_takes
from tasks.evaluation.probes import (
    evaluate_few_shots,
    evaluate_least_squares,
    evaluate_neighbours,
    gather_features,
)
from tasks.evaluation.sets import SetSpec, change_data, plan_sets
from utils.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from datasets import ImageBatch
    from tasks.evaluation.probes import Features
    from tasks.protocol import SumBatches
    from utils.config.data import DataSection
    from utils.runtime.base import Runtime

# Neighbours that vote, as in DINO; fewer if there are not as many examples.
NEIGHBOURS = 20
READERS = ("knn", "linear", "fewshot")
# Numbers of a table of features that is added up on the device.
_MOST_NUMBERS = 1 << 27


@dataclass(frozen=True)
class ProbedSet:
    """A labelled set: probes learn from its `bank`, and are evaluated on its `spec`."""

    spec: SetSpec
    bank: DataSection
    num_classes: int


def check_probed_sets(data: DataSection, student: nn.Module, width: int) -> tuple[ProbedSet, ...]:
    """Return the sets of data.evals by their metadata, for a student on the meta device.

    UserError if a set is missing, has no labels of one class each, or is too large.
    """
    for section in data.evals:
        for key in ("classes", "class_map"):
            value = getattr(section, key)
            if value != type(section).model_fields[key].default:
                raise UserError(
                    f"data.evals {section.name!r}: {key} ({value!r}) is not supported for probes, "
                    "which learn the set's own classes; remove it"
                )
    banks = {section.name: section.bank or data.train_split for section in data.evals}
    specs = plan_sets(data, data.evals, "data.evals")
    return tuple(_look_at(spec, banks[spec.group], student, width) for spec in specs)


def check_score(score: str, sets: tuple[ProbedSet, ...]) -> None:
    """Refuse an unknown score, or one of a set that not every evaluation includes."""
    name, _, reader = score.rpartition("/")
    spec = next((probed.spec for probed in sets if probed.spec.name == name), None)
    if spec is None or reader.partition("_")[0] not in READERS:
        raise UserError(
            f"unknown distill.score {score!r}; use NAME/knn, NAME/linear or NAME/fewshot_N of one "
            f"of data.evals{f', such as {sets[0].spec.name}/knn' if sets else ''}"
        )
    if spec.every != 1:
        raise UserError(
            f"distill.score ({score!r}) needs its set in every evaluation, not in every "
            f"{spec.every}th; remove `every` from that set"
        )


class Prober:
    """Probes of a run's labelled sets, on features [B, D]; each pass opens its files anew."""

    def __init__(
        self,
        runtime: Runtime,
        sets: tuple[ProbedSet, ...],
        ask: Callable[[nn.Module, ImageBatch], Tensor],
    ) -> None:
        self._runtime, self._sets, self._ask = runtime, sets, ask

    def evaluate_extra_sets(
        self, model: nn.Module, sum_over: SumBatches, number: int | None
    ) -> dict[str, float]:
        """Return `NAME/knn`, `NAME/linear`, `NAME/fewshot_N` in percent of the sets that are due.

        `number` is that of the run's evaluation, from 1; None for the last one: all are due.
        """
        was_training = model.training
        model.eval()
        metrics: dict[str, float] = {}
        for probed in self._sets:
            if number is None or number % probed.spec.every == 0:
                own = self._judge(probed, model, sum_over)
                metrics |= {f"{probed.spec.name}/{name}": value for name, value in own.items()}
        model.train(was_training)
        return metrics

    def _judge(self, probed: ProbedSet, model: nn.Module, sum_over: SumBatches) -> dict[str, float]:
        sides, classes = (probed.bank, probed.spec.data), probed.num_classes
        train, test = (self._gather(data, classes, model, sum_over) for data in sides)
        if not (np.isfinite(train.values).all() and np.isfinite(test.values).all()):
            return dict.fromkeys(("knn", "linear"), math.nan)
        count = min(NEIGHBOURS, len(train.labels))
        near = evaluate_neighbours(self._runtime, sum_over, train, test, (count,))
        shots = evaluate_few_shots(train, test)
        return {
            "knn": near[count],
            "linear": evaluate_least_squares(train, test),
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
            facts = require_facts(source.describe(selection, "eval"), ImageFacts, data.source)
        except UserError as error:
            raise UserError(f"{spec.key} {spec.name!r}: {error}") from error
        if facts.several_labels:
            raise UserError(
                f"{spec.key} {spec.name!r} has lists of labels, but probes need one class each; "
                "use another label_key"
            )
        if selection.num_examples * (width + 2) > _MOST_NUMBERS:
            raise UserError(
                f"{spec.key} {spec.name!r}: {selection.num_examples} examples of "
                f"{data.eval_split} with {width} features are too many to probe in a run; use a "
                "slice of the split, or python -m tools.evaluate --probes on the export"
            )
        check_model_takes(spec, facts.image_shape, student)
        classes.append(facts.num_classes)
    return ProbedSet(spec, sides[1], max(classes))
