"""Goes over the sets on one replica: what is counted of a model, and of a teacher beside it."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine import sum_batches
from models.patches.choice import patch_for
from models.trained import TrainedModel, open_trained
from models.transforms import InputTransform, to_pixels
from tasks.evaluation.counts import (
    SetResult,
    count_set,
    count_shared,
    count_sums,
    flip_mean,
    restrict,
    summarise_set,
)
from tasks.evaluation.judge import Judge
from tasks.evaluation.probes import evaluate_few_shots, evaluate_neighbours
from tasks.evaluation.sets import EvaluatedSet
from tools.evaluate.plan import TEACHER, JudgePlan, make_plan
from tools.evaluate.probes.features import extract_features
from tools.evaluate.probes.linear import judge_linear
from tools.evaluate.report import SetFinding, Shared, write_report
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

# Above so many classes no matrix of answers is counted.
_MOST_PAIRS = 2048


@dataclass(frozen=True)
class Subject:
    """A model on the device, as it is asked.

    Attributes:
      classes: [K] of the device, its class for each that is counted; none: the same.
      flip: also asks about the mirrored image.
    """

    trained: TrainedModel
    transform: InputTransform
    classes: Tensor | None
    flip: bool

    def answer(self, images: Tensor) -> Tensor:
        """Logits [B, K] of uint8 images [B, H, W, C]."""
        logits = self._ask(images)
        if self.flip:
            logits = flip_mean(logits, self._ask(images.flip(2)))
        return logits if self.classes is None else logits.index_select(1, self.classes)

    def _ask(self, images: Tensor) -> Tensor:
        return self.trained.compute_outputs(self.transform(to_pixels(images)))[1]


def evaluate(options: argparse.Namespace) -> int:
    """Look at everything on the host, then judge on the configured runtime."""
    require_at_least(0, options, "per_class")
    require_at_least(0, options, "worst")
    if options.worst and options.out is None:
        raise UserError(f"--worst {options.worst} draws a picture; add --out DIR for it")
    require_at_least(1, options, "probe_epochs")
    prepare_folder(options.out, "--out")
    plan = make_plan(options)
    return launch(plan.config.runtime, judge, plan, options)


def judge(runtime: Runtime, plan: JudgePlan, options: argparse.Namespace) -> None:
    """On one replica: judge all sets; rank zero reports."""
    setup_logging(runtime.ranks.index, runtime.ranks.size)
    trained = load_trained(options)
    subjects = [_place(runtime, plan, trained, options.flip)]
    if options.teacher:
        teacher = open_trained(options.teacher, TEACHER)
        subjects.append(_place(runtime, plan, teacher, options.flip, plan.teacher_classes))
    judged = Judge(runtime, plan.sets, plan.classes.count)
    try:
        findings = [
            _judge_set(runtime, judged, one, subjects, plan.classes.count) for one in plan.sets
        ]
        if options.worst:
            findings = [_add_worst(runtime, judged, one, subjects, options) for one in findings]
    finally:
        judged.close()
    probes = _probe(runtime, plan, options, trained) if options.probes else {}
    if runtime.ranks.is_writer:
        write_report(plan, options, trained, findings, probes)


def _place(
    runtime: Runtime,
    plan: JudgePlan,
    trained: TrainedModel,
    flip: bool,
    classes: list[int] | None = None,
) -> Subject:
    patch_for(runtime, plan.config.model, trained.model, frozen=True)
    runtime.prepare(trained.model)
    transform = trained.create_transform()
    if classes is not None:
        transform.size = trained.image_shape[0]
    own = None if classes is None else torch.tensor(classes).to(runtime.device)
    return Subject(trained, transform.to(runtime.device), own, flip)


def _judge_set(
    runtime: Runtime, judged: Judge, shown: EvaluatedSet, subjects: list[Subject], classes: int
) -> SetFinding:
    pairs = classes <= _MOST_PAIRS

    def count(batch: ImageBatch) -> Tensor:
        answers = [restrict(one.answer(batch.images), batch) for one in subjects]
        found = [count_set(one, batch, pairs=pairs) for one in answers]
        if len(answers) > 1:
            found.append(count_shared(*answers, batch))
        return torch.cat(found)

    sums = sum_batches(count, judged.open(shown).batches(), runtime)
    size = count_sums(classes, pairs=pairs)
    verdicts: list[SetResult] = [
        summarise_set(sums[i * size : (i + 1) * size], classes, several=shown.several)
        for i in range(len(subjects))
    ]
    for verdict, who in zip(verdicts, (WEIGHTS_KEY, TEACHER), strict=False):
        if not all(map(math.isfinite, verdict.metrics.values())):
            raise UserError(
                f"{who} gives answers that are not finite on {shown.spec.name}; check its weights, "
                "its --pp and runtime.precision"
            )
    competing = judged.open(shown).num_competing
    get_logger().info("%s: top-1 %.2f", shown.spec.name, verdicts[0].metrics["top1"])
    if len(subjects) == 1:
        return SetFinding(shown, competing, verdicts[0])
    return SetFinding(shown, competing, *verdicts, Shared(*sums[2 * size :].tolist()))


def _add_worst(
    runtime: Runtime, judged: Judge, finding: SetFinding, subjects: list[Subject],
    options: argparse.Namespace,
) -> SetFinding:  # fmt: skip
    """A second pass over a set that is no corruption, for its worst images."""
    if finding.shown.spec.corruption is not None:
        return finding
    batches = judged.open(finding.shown).batches()
    return replace(finding, worst=find_worst(runtime, batches, subjects[0].answer, options.worst))


def _probe(
    runtime: Runtime, plan: JudgePlan, options: argparse.Namespace, trained: TrainedModel
) -> JsonObject:
    """What simple readers make of the features; every rank has all of them."""
    data = plan.config.data
    train, test = (
        extract_features(runtime, trained, data, split)
        for split in (data.train_split, data.eval_split)
    )
    found: JsonObject = {
        "dataset": data.name, "train": data.train_split, "test": data.eval_split,
        "train_examples": len(train.labels), "test_examples": len(test.labels),
        "features": train.values.shape[1],
    }  # fmt: skip
    if "knn" in options.probes:
        found["knn"] = evaluate_neighbours(
            runtime, partial(sum_batches, runtime=runtime), train, test
        )
    if "fewshot" in options.probes:
        shots = evaluate_few_shots(train, test)
        found["fewshot"] = {
            count: {"mean": sum(seeds) / len(seeds), "seeds": seeds}
            for count, seeds in shots.items()
        }
    if "linear" in options.probes:
        chosen, heads = judge_linear(runtime, train, test, options.probe_epochs)
        found["linear"] = {"chosen": asdict(chosen), "heads": [asdict(head) for head in heads]}
    return found
