"""What a classification learns from its targets: a softmax over the classes, or a sigmoid each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from losses.base import LossInputs
from losses.logits import soft_cross_entropy
from losses.reductions import as_constant, mean_valid, upcast
from utils.errors import UserError, get_hint

if TYPE_CHECKING:
    from utils.config.sections import TrainSection

SOFTMAX, BCE = "softmax", "bce"
CLASS_LOSSES = (SOFTMAX, BCE)
_OF_BCE = ("bce_threshold", "bce_sum", "bce_positive_weight")


def binary_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    mask: Tensor | None = None,
    positive_weight: float = 1.0,
    class_weights: Tensor | None = None,
    sum_classes: bool = False,
) -> Tensor:
    """Cross-entropy of K independent yes-or-no answers.

    Args:
      logits: [B, K], of the probability of yes; receive the gradient.
      targets: [B, K], 0 to 1; constant here.
      mask: bool [B], valid examples.
      positive_weight: factor of the part that a yes adds.
      class_weights: [K], factors of the classes.
      sum_classes: sum over K; else their mean.

    Returns:
      Scalar in nats: averaged over valid examples.
    """
    logits = upcast(logits)
    targets = as_constant(targets).to(logits.dtype)
    yes, no = F.logsigmoid(logits), F.logsigmoid(-logits)
    each = -(positive_weight * targets * yes + (1.0 - targets) * no)
    if class_weights is not None:
        each = each * class_weights.to(each.dtype)
    return mean_valid(each.sum(dim=1) if sum_classes else each.mean(dim=1), mask)


class ClassLoss(nn.Module):
    """The task loss of a classification, as `WeightedLoss` calls it.

    Args:
      section: the keys task_loss, class_weights and those that begin with bce.
    """

    class_weights: Tensor | None

    def __init__(self, section: TrainSection) -> None:
        super().__init__()
        self.section = section
        weights = torch.tensor(section.class_weights) if section.class_weights else None
        # A buffer is data of the graph; it is no part of what a run has become.
        self.register_buffer("class_weights", weights, persistent=False)

    def forward(self, inputs: LossInputs) -> Tensor:
        """The scalar value of the logits and targets of a step."""
        logits, targets, section = inputs.student_logits, inputs.targets, self.section
        assert targets is not None, "a classification has targets"
        if section.task_loss != BCE:
            if self.class_weights is not None:
                targets = targets * self.class_weights
            return soft_cross_entropy(logits, targets, mask=inputs.mask)
        if section.bce_threshold is not None:
            targets = (targets > section.bce_threshold).to(targets.dtype)
        return binary_cross_entropy(
            logits,
            targets,
            mask=inputs.mask,
            positive_weight=section.bce_positive_weight,
            class_weights=self.class_weights,
            sum_classes=section.bce_sum,
        )


def create_class_loss(section: TrainSection, num_classes: int) -> ClassLoss:
    """The task loss that train.task_loss names; empty: softmax.

    Raises:
      UserError: there is none of that name, a key belongs to another one, or the weights are not
        those of the classes.
    """
    name = section.task_loss or SOFTMAX
    if name not in CLASS_LOSSES:
        raise UserError(
            f"train.task_loss ({name!r}) is no loss of train.task=classify; "
            f"{get_hint(name, CLASS_LOSSES)}"
        )
    for key in _OF_BCE if name != BCE else ():
        value = getattr(section, key)
        if value != type(section).model_fields[key].default:
            raise UserError(
                f"train.{key} ({value!r}) has no effect on train.task_loss={name}; set "
                f"train.task_loss={BCE}, or leave it out"
            )
    weights = section.class_weights
    if weights and (len(weights) != num_classes or not sum(weights)):
        raise UserError(
            f"train.class_weights has {len(weights)} numbers, {sum(weights):g} in all, for "
            f"{num_classes} classes; give one number for each class, some of them above 0"
        )
    return ClassLoss(section)
