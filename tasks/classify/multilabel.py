"""Classification of images with any number of classes: a yes or no for each class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from big_vision.input.batches import RIGHT
from big_vision.input.images.labelled import ImageFacts
from big_vision.input.source import require_facts
from losses.tasks.classes import CLASS_LOSSES, compute_bce, create_class_loss
from models.transforms import to_pixels
from tasks.classify.check import ClassifyCheck
from tasks.classify.counting import place_rows
from tasks.classify.synthetic import SyntheticClassify
from tasks.classify.task import Classify
from utils.config.load import change
from utils.errors import UserError
from utils.log import get_logger
from utils.metrics import Evaluation

if TYPE_CHECKING:
    from pathlib import Path

    from datasets import Batch, ImageBatch
    from losses.tasks.classes import ClassLoss
    from tasks.classify.check import ClassifyFacts
    from tasks.protocol import Loaders
    from utils.config.load import RunConfig
    from utils.config.train import TrainSection

# Most numbers in the table of scores that the device sums over batches: 512 MiB in float32.
MOST_NUMBERS = 1 << 27


class ScoreTable:
    """Counts and scores of each batch as one vector; vectors are summed over batches and ranks.

    `examples` is the size of the largest evaluated split, over all ranks. If the table would have
    more than `most_numbers`, it keeps only every `stride`-th example; `stride` is 1 otherwise.
    """

    def __init__(self, examples: int, classes: int, most_numbers: int = MOST_NUMBERS) -> None:
        self.classes = classes
        self.stride = max(1, -(-examples * (2 * classes + 1) // most_numbers))
        self._rows = -(-examples // self.stride)
        if self.stride > 1:
            get_logger().warning(
                "map is computed on 1 in %d examples of the evaluated splits: %d examples with %d "
                "classes are too many for one table; F1 and the loss are computed on all",
                self.stride,
                examples,
                classes,
            )

    def count(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return sums over the valid examples of a batch, as one float32 vector.

        They are binary cross-entropy in nats of logits [B, K], summed over classes; examples; for
        each class its true positives, false positives and false negatives; then the table, in which
        each example has its scores, its classes and a 1.
        """
        logits = logits.float()
        has = batch.draws[RIGHT]
        valid = batch.mask.unsqueeze(1)
        loss = compute_bce(logits, has).sum(dim=1)
        named, has_not = (logits > 0).float(), 1.0 - has
        sums = [
            torch.where(batch.mask, loss, 0.0).sum().unsqueeze(0),
            batch.mask.float().sum().unsqueeze(0),
            *(
                (part * valid).sum(dim=0)
                for part in (has * named, has_not * named, has - has * named)
            ),
        ]
        rows = torch.cat([logits, has, torch.ones_like(has[:, :1])], dim=1)
        is_held = batch.mask & (batch.indices % self.stride == 0)
        table = place_rows(rows, batch.indices // self.stride, is_held, self._rows)
        return torch.cat([*sums, table.flatten()])

    def summarise(self, sums: Tensor) -> dict[str, float]:
        """Return `map` and F1 scores in percent, `loss` in nats, `examples`; `sums` on the host.

        Mean average precision is the mean over classes with at least one example. F1 counts a logit
        above 0 as a prediction: over all outputs at once (micro), and as the mean over classes
        (macro), where a class without examples and predictions counts 0.

        Source: definitions of scikit-learn's average_precision_score and f1_score.
        """
        loss, examples = sums[:2].tolist()
        counts, table = sums[2:].split([3 * self.classes, sums.numel() - 2 - 3 * self.classes])
        right, wrong, lost = counts.double().view(3, self.classes)
        return {
            "map": 100.0 * self._compute_map(table.view(self._rows, -1).numpy()),
            "f1_micro": 100.0 * float(_compute_f1(right.sum(), wrong.sum(), lost.sum())),
            "f1_macro": 100.0 * float(_compute_f1(right, wrong, lost).mean()),
            "loss": loss / max(examples, 1.0),
            "examples": examples,
        }

    def _compute_map(self, table: np.ndarray) -> float:
        assert table[:, -1].max(initial=0.0) <= 1.0, "an example was counted twice"
        table = table[table[:, -1] > 0]
        # NaN is no score: it ranks last, and the loss shows it.
        scores = np.nan_to_num(
            table[:, : self.classes].T, nan=-np.inf, posinf=np.inf, neginf=-np.inf
        )
        has = table[:, self.classes : -1].T > 0
        values = list(map(compute_average_precision, scores, has))
        return float(np.nanmean(values)) if has.any() else 0.0


def compute_average_precision(scores: np.ndarray, has: np.ndarray) -> float:
    """Compute the mean precision at the scores of a class's examples; NaN if it has none.

    `scores` are [N], `has` bool [N]; equal scores count together. Source: scikit-learn's
    average_precision_score.
    """
    if not has.any():
        return float("nan")
    ordered, own = np.sort(scores), np.sort(scores[has])
    named = len(ordered) - np.searchsorted(ordered, own)
    hits = len(own) - np.searchsorted(own, own)
    return float(np.mean(hits / named))


def _compute_f1(right: Tensor, wrong: Tensor, lost: Tensor) -> Tensor:
    return 2 * right / (2 * right + wrong + lost).clamp(min=1.0)


_LOSSES = tuple(name for name in CLASS_LOSSES if name != "softmax")


def create_set_loss(section: TrainSection, num_classes: int) -> ClassLoss:
    """Create the task loss of sets of classes; bce by default."""
    return create_class_loss(section, num_classes, _LOSSES)


class MultilabelCheck(ClassifyCheck):
    create_loss = staticmethod(create_set_loss)

    def _choose_classes(self) -> int:
        config, images = self.config, self.dataset.examples["train"]
        images = require_facts(images, ImageFacts, config.data.source)
        if not images.several_labels:
            raise UserError(
                f"data.label_key ({config.data.label_key}) holds one class for each example, but "
                "train.task=multilabel needs lists; set train.task=classify, or use a feature of "
                "several classes or a data.labels_file"
            )
        if config.model.num_classes not in (None, images.num_classes):
            raise UserError(
                f"model.num_classes ({config.model.num_classes}) is not the {images.num_classes} "
                "classes of the lists of labels; remove it"
            )
        return images.num_classes


class SyntheticMultilabel(SyntheticClassify):
    def replace_data(self, examples: int, folder: Path, *, by_trial: bool = False) -> RunConfig:
        config = super().replace_data(examples, folder, by_trial=by_trial)
        return change(config, data={"name": f"{config.data.name},labels=2", "labels_file": ""})


class Multilabel(Classify):
    """A micro-batch on the device -> mixed images -> student -> one loss of K outputs."""

    score_name = "mAP"
    check = MultilabelCheck
    synthetic = "tasks.classify.multilabel:SyntheticMultilabel"
    create_loss = staticmethod(create_set_loss)

    def __init__(self, config: RunConfig, facts: ClassifyFacts, loaders: Loaders) -> None:
        super().__init__(config, facts, loaders)
        # All evaluated splits have a table of the same shape, so that they share one graph.
        sizes = facts.dataset.num_examples
        most = max(size for role, size in sizes.items() if role != "train")
        self._table = ScoreTable(most, facts.num_classes)

    def get_labels(self, batch: ImageBatch) -> Tensor:
        return batch.draws[RIGHT]

    def count_with_correctness(self, model: nn.Module, batch: ImageBatch) -> tuple[Tensor, None]:
        """Return the sums of `ScoreTable`, and None: no example is correct or wrong as a whole."""
        return self._table.count(self.predict(model, batch), batch), None

    def summarise(self, sums: Tensor) -> Evaluation:
        metrics = self._table.summarise(sums)
        return Evaluation(metrics, metrics["map"])

    def describe(self, metrics: Mapping[str, float]) -> str:
        return (
            f"mAP {metrics['map']:.2f}, F1 {metrics['f1_micro']:.2f} (micro) and "
            f"{metrics['f1_macro']:.2f} (macro), loss {metrics['loss']:.4f}, "
            f"{metrics['examples']:.0f} examples"
        )

    def create_supervised_loss(self, batch: ImageBatch) -> Callable[[nn.Module], Tensor]:
        with torch.no_grad():
            inputs, targets = self.transform(to_pixels(batch.images)), batch.draws[RIGHT]
        return lambda model: compute_bce(model(inputs), targets).sum(dim=1).mean()
