"""Evaluates a model, and a teacher beside it, on sets of images: the work of a replica."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine import sum_batches
from models.patches.choice import patch_for
from models.trained import TrainedModel, open_trained
from models.transforms import InputTransform, to_pixels
from tasks.evaluation.counts import (
    count_set,
    count_shared,
    count_sums,
    flip_mean,
    restrict,
    summarise_set,
)
from tasks.evaluation.evaluator import SetEvaluator
from tasks.evaluation.probes import evaluate_few_shots, evaluate_neighbours
from tasks.evaluation.sets import EvaluatedSet
from tools.evaluate.features import extract_features
from tools.evaluate.linear_probe import evaluate_linear_heads
from tools.evaluate.plan import TEACHER, EvaluationPlan, make_plan
from tools.evaluate.report import SHARED, SetFinding, write_report
from tools.evaluate.worst import find_worst
from tools.weights.flags import WEIGHTS_KEY
from tools.weights.load_model import load_trained
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.log import get_logger, setup_logging
from utils.programs import prepare_folder, require_at_least
from utils.runtime.launcher import launch

if TYPE_CHECKING:
    from datasets import ImageBatch
    from utils.runtime.base import Runtime

# With more classes, no matrix of labels and outputs is counted.
_MOST_PAIRS = 2048


@dataclass(frozen=True)
class PlacedModel:
    """A model on the device."""

    trained: TrainedModel
    transform: InputTransform
    # [K] on the device, its class for each counted one; None if they are the same
    classes: Tensor | None
    flip: bool  # whether the probabilities of an image and its mirror image are averaged

    def compute_logits(self, images: Tensor) -> Tensor:
        """Return logits [B, K] of uint8 images [B, H, W, C]."""
        logits = self._forward(images)
        if self.flip:
            logits = flip_mean(logits, self._forward(images.flip(2)))
        return logits if self.classes is None else logits.index_select(1, self.classes)

    def _forward(self, images: Tensor) -> Tensor:
        return self.trained.compute_outputs(self.transform(to_pixels(images)))[1]


def evaluate(options: argparse.Namespace) -> int:
    """Check flags, weights and sets on the host, then evaluate on the configured runtime."""
    require_at_least(0, options, "per_class", "worst")
    if options.worst and options.out is None:
        raise UserError(f"--worst {options.worst} draws a picture; add --out DIR for it")
    require_at_least(1, options, "probe_epochs")
    prepare_folder(options.out, "--out")
    plan = make_plan(options)
    code = plan.config.run.own_code
    return launch(plan.config.runtime, evaluate_replica, plan, options, own_code=code)


def evaluate_replica(runtime: Runtime, plan: EvaluationPlan, options: argparse.Namespace) -> None:
    """Evaluate all sets as one replica; rank zero writes the report."""
    setup_logging(runtime.ranks.index, runtime.ranks.size)
    trained = load_trained(options)
    models = [_place(runtime, plan, trained, options.flip)]
    if options.teacher:
        teacher = open_trained(options.teacher, TEACHER)
        models.append(_place(runtime, plan, teacher, options.flip, plan.teacher_classes))
    sets = SetEvaluator(runtime, plan.sets, plan.classes.count)
    try:
        findings = [
            _evaluate_set(runtime, sets, evaluated, models, plan.classes.count, options.worst)
            for evaluated in plan.sets
        ]
    finally:
        sets.close()
    probes = _probe(runtime, plan, options, trained) if options.probes else {}
    if runtime.ranks.is_writer:
        write_report(plan, options, trained, findings, probes)


def _place(
    runtime: Runtime,
    plan: EvaluationPlan,
    trained: TrainedModel,
    flip: bool,
    classes: list[int] | None = None,
) -> PlacedModel:
    patch_for(runtime, plan.config.model, trained.model, frozen=True)
    runtime.prepare(trained.model)
    transform = trained.create_transform()
    if classes is not None:
        transform.size = trained.image_shape[0]
    own = None if classes is None else torch.tensor(classes).to(runtime.device)
    return PlacedModel(trained, transform.to(runtime.device), own, flip)


def _evaluate_set(
    runtime: Runtime,
    sets: SetEvaluator,
    evaluated: EvaluatedSet,
    models: list[PlacedModel],
    classes: int,
    worst: int,
) -> SetFinding:
    spec, opened = evaluated.spec, sets.open(evaluated)
    pairs = classes <= _MOST_PAIRS

    def count(batch: ImageBatch) -> Tensor:
        logits = [restrict(model.compute_logits(batch.images), batch) for model in models]
        counts = [count_set(part, batch, pairs=pairs) for part in logits]
        counts += [count_shared(logits[0], other, batch) for other in logits[1:]]
        return torch.cat(counts)

    sums = sum_batches(count, opened.batches(), runtime)
    size = count_sums(classes, pairs=pairs)
    results = [
        summarise_set(sums[i * size : (i + 1) * size], classes, several=evaluated.several)
        for i in range(len(models))
    ]
    for result, key in zip(results, (WEIGHTS_KEY, TEACHER), strict=False):
        if not all(map(math.isfinite, result.metrics.values())):
            raise UserError(
                f"{key} gives outputs that are not finite on {spec.name}; check its weights, "
                "its --pp and runtime.precision"
            )
    get_logger().info("%s: top-1 %.2f", spec.name, results[0].metrics["top1"])
    teacher = shared = images = None
    if len(models) > 1:
        teacher = results[1]
        *counts, examples = sums[2 * size :].tolist()
        shares = [100.0 * count / max(examples, 1.0) for count in counts]
        shared = dict(zip(SHARED, shares, strict=True))
    if worst and spec.corruption is None:
        images = find_worst(runtime, opened.batches(), models[0].compute_logits, worst)
    return SetFinding(evaluated, opened.num_competing, results[0], teacher, shared, images)


def _probe(
    runtime: Runtime, plan: EvaluationPlan, options: argparse.Namespace, trained: TrainedModel
) -> JsonObject:
    """Evaluate simple classifiers of the features; every rank has all features."""
    data = plan.config.data
    train, test = (
        extract_features(runtime, trained, data, split)
        for split in (data.train_split, data.eval_split)
    )
    results: JsonObject = {
        "dataset": data.name,
        "train": data.train_split,
        "test": data.eval_split,
        "train_examples": len(train.labels),
        "test_examples": len(test.labels),
        "features": train.values.shape[1],
    }
    if "knn" in options.probes:
        sum_over = partial(sum_batches, runtime=runtime)
        results["knn"] = evaluate_neighbours(runtime, sum_over, train, test)
    if "fewshot" in options.probes:
        results["fewshot"] = {
            count: {"mean": sum(seeds) / len(seeds), "seeds": seeds}
            for count, seeds in evaluate_few_shots(train, test).items()
        }
    if "linear" in options.probes:
        chosen, heads = evaluate_linear_heads(runtime, train, test, options.probe_epochs)
        results["linear"] = {"chosen": asdict(chosen), "heads": [asdict(head) for head in heads]}
    return results
