"""Images that have several classes, or none: a classification by one yes or no for each class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from big_vision.input.batches import RIGHT
from big_vision.input.images.labelled import require_images
from losses.tasks.classes import CLASS_LOSSES, create_class_loss
from losses.tasks.yes_or_no import compute_bce
from models.transforms import to_pixels
from tasks.classify.check import ClassifyCheck
from tasks.classify.ranking import ScoreTable
from tasks.classify.synthetic import ClassifyTwin
from tasks.classify.task import Classify
from utils.config.load import change
from utils.errors import UserError
from utils.metrics import Evaluation

if TYPE_CHECKING:
    from pathlib import Path

    from datasets import ImageBatch, Loader
    from losses.tasks.classes import ClassLoss
    from tasks.classify.check import ClassifyFacts
    from utils.config.load import RunConfig
    from utils.config.train import TrainSection

_LOSSES = tuple(name for name in CLASS_LOSSES if name != "softmax")


def create_set_loss(section: TrainSection, num_classes: int) -> ClassLoss:
    """The task loss of sets of classes; bce where none is named."""
    return create_class_loss(section, num_classes, _LOSSES)


class MultilabelCheck(ClassifyCheck):
    """As of a classification, for labels that are sets."""

    create_loss = staticmethod(create_set_loss)

    def _choose_classes(self) -> int:
        config, images = self.config, self.dataset.examples["train"]
        images = require_images(images, config.data.source)
        if not images.several_labels:
            raise UserError(
                f"data.label_key ({config.data.label_key}) is one class for each example, but "
                "train.task=multilabel learns lists of them; set train.task=classify, or name a "
                "feature of several classes or a data.labels_file"
            )
        if config.model.num_classes not in (None, images.num_classes):
            raise UserError(
                f"model.num_classes ({config.model.num_classes}) is not the {images.num_classes} "
                "classes of the lists of labels; leave it out"
            )
        return images.num_classes


class MultilabelTwin(ClassifyTwin):
    """Made-up images with sets of classes."""

    def replace_data(self, examples: int, folder: Path, *, by_trial: bool = False) -> RunConfig:
        """As of a classification; each image has two classes or one."""
        config = super().replace_data(examples, folder, by_trial=by_trial)
        return change(config, data={"name": f"{config.data.name},labels=2", "labels_file": ""})


class Multilabel(Classify):
    """A micro-batch on the device -> mixed images -> student -> one loss of K answers."""

    score_name = "mAP"
    check = MultilabelCheck
    twin = "tasks.classify.multilabel:MultilabelTwin"
    create_loss = staticmethod(create_set_loss)

    def __init__(
        self, config: RunConfig, facts: ClassifyFacts, loaders: Mapping[str, Loader]
    ) -> None:
        super().__init__(config, facts, loaders)
        # One shape for the evaluated splits, so that they are one graph.
        sizes = facts.dataset.num_examples
        most = max(size for role, size in sizes.items() if role != "train")
        self._table = ScoreTable(most, facts.num_classes)

    def get_labels(self, batch: ImageBatch) -> Tensor:
        """[B, K], a 1 for each class that the example has."""
        return batch.draws[RIGHT]

    def count_marked(self, model: nn.Module, batch: ImageBatch) -> tuple[Tensor, None]:
        """Sums and scores of the answers; no example is right or wrong as a whole."""
        return self._table.count(self.predict(model, batch), batch), None

    def summarise(self, sums: Tensor) -> Evaluation:
        """`map`, `f1_micro` and `f1_macro` in percent, `loss` in nats; the score is the mAP."""
        metrics = self._table.summarise(sums)
        return Evaluation(metrics, metrics["map"])

    def describe(self, metrics: Mapping[str, float]) -> str:
        """An evaluation's numbers, for a person."""
        return (
            f"mAP {metrics['map']:.2f}, F1 {metrics['f1_micro']:.2f} (micro) and "
            f"{metrics['f1_macro']:.2f} (macro), loss {metrics['loss']:.4f}, "
            f"{metrics['examples']:.0f} examples"
        )

    def plan_plain_loss(self, batch: ImageBatch) -> Callable[[nn.Module], Tensor]:
        """Binary cross-entropy of images that are normalised already."""
        with torch.no_grad():
            inputs, targets = self.transform(to_pixels(batch.images)), batch.draws[RIGHT]
        return lambda model: compute_bce(model(inputs), targets).sum(dim=1).mean()
