"""Losses of classes: a softmax over the classes, or K independent yes-or-no decisions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from losses.base import LossInputs
from losses.logits.kd import soft_cross_entropy
from losses.reductions import Mask, as_constant, mean_valid, upcast
from utils.errors import UserError, get_hint

if TYPE_CHECKING:
    from utils.config.train import TrainSection


def compute_bce(logits: Tensor, targets: Tensor, *, positive_weight: float = 1.0) -> Tensor:
    """Compute binary cross-entropy, with the part of a yes times `positive_weight`."""
    yes, no = F.logsigmoid(logits), F.logsigmoid(-logits)
    return -(positive_weight * targets * yes + (1.0 - targets) * no)


def compute_poly(
    logits: Tensor, targets: Tensor, *, epsilon: float = 2.0, gamma: float = 0.0, alpha: float = -1
) -> Tensor:
    """Compute Poly-1 on top of the focal loss: FL + epsilon * (1 - p_t)^(gamma + 1).

    Args:
      gamma: 0, or at least 1: how fast confident predictions lose their weight.
      alpha: weight of a yes, 1 - alpha that of a no; no weights if negative.

    Source: Leng et al. 2022, arXiv:2204.12511, as in timm 1.0.31.
    """
    share = torch.sigmoid(logits)
    missing = 1.0 - (targets * share + (1.0 - targets) * (1.0 - share))
    focus = missing**gamma if gamma else torch.ones_like(missing)
    value = compute_bce(logits, targets) * focus + epsilon * missing * focus
    if alpha < 0:
        return value
    return value * (targets * alpha + (1.0 - targets) * (1.0 - alpha))


def compute_focal(
    logits: Tensor, targets: Tensor, *, gamma: float = 2.0, alpha: float = 0.25
) -> Tensor:
    """Compute the focal loss by `compute_poly` (Lin et al. 2017, arXiv:1708.02002, section 3)."""
    return compute_poly(logits, targets, epsilon=0.0, gamma=gamma, alpha=alpha)


def compute_asymmetric(
    logits: Tensor,
    targets: Tensor,
    *,
    gamma_negative: float = 4.0,
    gamma_positive: float = 1.0,
    clip: float = 0.05,
) -> Tensor:
    """Compute the asymmetric loss: easy noes lose their weight faster than easy yeses.

    A no of a probability below `clip` costs nothing.

    Source: Ridnik et al. 2021, arXiv:2009.14119, as in timm 1.0.31.
    """
    yes = torch.sigmoid(logits)
    no = (1.0 - yes + clip).clamp(max=1.0)
    value = targets * yes.clamp(min=1e-8).log() + (1.0 - targets) * no.clamp(min=1e-8).log()
    right = yes * targets + no * (1.0 - targets)
    gamma = gamma_positive * targets + gamma_negative * (1.0 - targets)
    return -value * torch.pow(1.0 - right, gamma)


# Values of train.task_loss that take train.task_loss_args.
YES_OR_NO: dict[str, Callable[..., Tensor]] = {
    "focal": compute_focal,
    "asl": compute_asymmetric,
    "poly": compute_poly,
}
# Those that sum over the classes, as in their papers and timm; the others take means.
SUMMED = ("focal", "asl")
SOFTMAX, BCE = "softmax", "bce"
CLASS_LOSSES = (SOFTMAX, BCE, *YES_OR_NO)
_OF_BCE = ("bce_threshold", "bce_sum", "bce_positive_weight")


def binary_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    mask: Mask = None,
    positive_weight: float = 1.0,
    class_weights: Tensor | None = None,
    sum_classes: bool = False,
) -> Tensor:
    """Compute the cross-entropy of K independent yes-or-no decisions, in nats.

    Logits are [B, K], of the probability of yes, and targets [B, K] from 0 to 1. `positive_weight`
    is a factor on the part that a yes adds, `class_weights` [K] on the classes, of which
    `sum_classes` takes the sum, else the mean. Averaged over valid examples.
    """
    logits = upcast(logits)
    targets = as_constant(targets).to(logits.dtype)
    each = compute_bce(logits, targets, positive_weight=positive_weight)
    return _reduce(each, mask, class_weights, sum_classes)


def _reduce(each: Tensor, mask: Mask, class_weights: Tensor | None, sum_classes: bool) -> Tensor:
    if class_weights is not None:
        each = each * class_weights.to(each.dtype)
    return mean_valid(each.sum(dim=1) if sum_classes else each.mean(dim=1), mask)


class ClassLoss(nn.Module):
    """The task loss of a classification, as `WeightedLoss` calls it.

    It reads the keys task_loss, task_loss_args, class_weights and those that begin with bce.
    """

    class_weights: Tensor | None

    def __init__(self, section: TrainSection) -> None:
        super().__init__()
        self.section = section
        weights = torch.tensor(section.class_weights) if section.class_weights else None
        # A buffer is data of the graph; it is not saved, since the configuration holds it.
        self.register_buffer("class_weights", weights, persistent=False)

    def forward(self, inputs: LossInputs) -> Tensor:
        logits, targets, section = inputs.student_logits, inputs.targets, self.section
        assert targets is not None, "a classification has targets"
        if section.task_loss in YES_OR_NO:
            each = YES_OR_NO[section.task_loss](
                upcast(logits), as_constant(targets), **section.task_loss_args
            )
            return _reduce(each, inputs.mask, self.class_weights, section.task_loss in SUMMED)
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


def create_class_loss(
    section: TrainSection, num_classes: int, known: Sequence[str] = CLASS_LOSSES
) -> ClassLoss:
    """Create the task loss that train.task_loss names; by default the first of `known`.

    Those fit the task's targets; class_weights of the section are numbers, one for each class or
    none. A UserError for an unknown name or a key of another loss.
    """
    name = section.task_loss or known[0]
    if name not in known:
        raise UserError(
            f"unknown train.task_loss {name!r} for train.task={section.task}; "
            f"{get_hint(name, known)}"
        )
    section = type(section).model_validate({**section.model_dump(), "task_loss": name})
    _check_arguments(name, section.task_loss_args)
    for key in _OF_BCE if name != BCE else ():
        value = getattr(section, key)
        if value != type(section).model_fields[key].default:
            raise UserError(
                f"train.{key} ({value!r}) has no effect on train.task_loss={name}; set "
                f"train.task_loss={BCE}, or leave it out"
            )
    return ClassLoss(section)


def _check_arguments(name: str, arguments: Mapping[str, float]) -> None:
    """Raise a UserError for arguments that a loss does not have, or that give it no gradient."""
    known = ()
    if name in YES_OR_NO:
        parameters = inspect.signature(YES_OR_NO[name]).parameters.values()
        known = tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
    for key, value in arguments.items():
        if not known:
            raise UserError(
                f"train.task_loss_args ({key}) has no effect on train.task_loss={name}; set "
                f"{' or '.join(YES_OR_NO)}, or leave it out"
            )
        if key not in known:
            raise UserError(f"train.task_loss_args: {name} has no {key!r}; {get_hint(key, known)}")
        if key.startswith("gamma") and value != 0 and value < 1:
            raise UserError(
                f"train.task_loss_args: {key} ({value:g}) has no finite gradient at a sure answer; "
                "set it to 0, or to 1 or more"
            )
