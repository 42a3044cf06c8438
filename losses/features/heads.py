"""Losses that apply classifiers to features: WKD-L, SRRL, CAT-KD.

A head is the path of a linear layer, `fc` or `head`; its weights come with the activations.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from losses.base import Loss, LossInputs, get_teacher_logits
from losses.factory import check_positive
from losses.features.gaussians import get_vector
from losses.features.hints import (
    FeatureLoss,
    ProjectedLoss,
    compute_feature_mse,
    get_student_features,
    get_teacher_features,
    pool_adaptive,
)
from losses.logits.decoupled import split_log_probs
from losses.reductions import as_constant, mean_valid, unit_rows, upcast
from utils.errors import UserError

MIN_FLOW = 1e-20  # keeps the divisions of Sinkhorn's algorithm finite; far below any class


def compute_class_costs(weight: Tensor, sharpness: float) -> Tensor:
    """Compute [K, K] 1 - exp(-sharpness * (1 - cosine)) of the rows of a classifier.

    Source: Lv et al. 2024 (WKD-L), arXiv:2412.08139, section 3.1, with classifier weights as the
    prototypes of the classes.
    """
    rows = unit_rows(weight)
    return -torch.expm1(-sharpness * (1 - rows @ rows.T).clamp(min=0))


def compute_transport(
    first: Tensor, second: Tensor, costs: Tensor, *, entropy: float, iterations: int
) -> Tensor:
    """Compute [B] cost of the entropic transport plan of two distributions, Sinkhorn unrolled.

    Args:
      first, second: [B, K], rows sum to 1; the gradient flows through all iterations. Classes where
        both are 0 do not take part.
      costs: [K, K], symmetric.
      entropy: > 0, weight of the plan's entropy; if small, the cost is closer to the Wasserstein
        distance and more iterations are needed.
      iterations: fixed, so that the graph is static.
    """
    kernel = torch.exp(-costs / entropy)
    is_there = (first + second > 0).to(first.dtype)
    left = is_there / is_there.sum(dim=-1, keepdim=True)
    right = left
    for _ in range(iterations):
        right = second / (left @ kernel + MIN_FLOW)
        left = first / (right @ kernel + MIN_FLOW)
    return ((left @ (kernel * costs)) * right).sum(dim=-1)


class WassersteinLogits(Loss):
    """-p_t(y) log p_s(y) + gamma * transport between the distributions among the other classes.

    The first part is at temperature 1, the distributions among the classes other than y at
    `temperature`, with `compute_class_costs` of the teacher's classifier (the paper's other choice,
    similarities of features over the training set, is not offered). In nats and costs between 0
    and 1. Memory K^2.

    Source: Lv et al. 2024 (WKD-L), arXiv:2412.08139, section 3.1.
    """

    why_not_tokens = "moves mass between all pairs of classes, too many for a vocabulary"

    def __init__(
        self,
        teacher_head: str,
        temperature: float = 2.0,
        gamma: float = 1.0,
        sharpness: float = 1.0,
        entropy: float = 0.05,
        iterations: int = 10,
    ) -> None:
        super().__init__()
        check_positive("wkd_l", temperature=temperature, sharpness=sharpness, entropy=entropy)
        check_positive("wkd_l", iterations=iterations)
        self.teacher_head = teacher_head
        self.temperature, self.gamma, self.sharpness = temperature, gamma, sharpness
        self.plan = {"entropy": entropy, "iterations": iterations}

    def teacher_layers(self) -> tuple[str, ...]:
        return (f"{self.teacher_head}.weight",)

    def compute(self, inputs: LossInputs) -> Tensor:
        student = upcast(inputs.student_logits)
        teacher = as_constant(get_teacher_logits(inputs))
        (weight,) = get_teacher_features(inputs, *self.teacher_layers())
        costs = compute_class_costs(weight, self.sharpness)
        if costs.shape[0] != student.shape[-1]:
            raise UserError(
                f"distill.losses: wkd_l.teacher_head ({self.teacher_head}) has {costs.shape[0]} "
                f"rows for {student.shape[-1]} classes; name the teacher's classifier"
            )
        classes = inputs.target_classes()
        others = 1 - one_hot(classes.long(), student.shape[-1]).to(student.dtype)
        rest = [split_log_probs(x / self.temperature, classes)[2] for x in (student, teacher)]
        distance = compute_transport(*(x.exp() * others for x in rest), costs, **self.plan)
        index = classes.long().unsqueeze(-1)
        own = torch.log_softmax(student, dim=-1).gather(-1, index).squeeze(-1)
        target = torch.softmax(teacher, dim=-1).gather(-1, index).squeeze(-1)
        return mean_valid(self.gamma * distance - target * own, inputs.mask)


class SoftmaxRegression(ProjectedLoss):
    """MSE of features, and MSE of the teacher's classifier on both.

    feature_weight * mean of (f_s - f_t)^2 + head_weight * mean over classes of
    (h_t(f_s) - h_t(f_t))^2; f are averages over positions, the student's after its projection r;
    h_t is the teacher's own classifier, constant. One pair: the layers before the classifiers. The
    authors' r is a 1x1 convolution, BatchNorm and ReLU (`regressor: convreg`).

    Source: Yang et al. 2021 (SRRL), ICLR 2021, as in its authors' code.
    """

    def __init__(
        self,
        layers: Mapping[str, str],
        teacher_head: str,
        feature_weight: float = 1.0,
        head_weight: float = 1.0,
        regressor: str = "auto",
    ) -> None:
        super().__init__(layers, regressor)
        require_one_pair("srrl", self)
        self.teacher_head = teacher_head
        self.weights = feature_weight, head_weight

    def teacher_layers(self) -> tuple[str, ...]:
        head = self.teacher_head
        return (*super().teacher_layers(), f"{head}.weight", f"{head}.bias")

    def compute(self, inputs: LossInputs) -> Tensor:
        student, teacher = self.get_pair(inputs, next(iter(self.layers)))
        weight, bias = get_teacher_features(inputs, *self.teacher_layers()[1:])
        vectors = [get_vector(side) for side in (student, teacher)]
        answers = [side @ weight.T + bias for side in vectors]
        parts = (
            compute_feature_mse(*vectors, mask=inputs.mask),
            compute_feature_mse(*answers, mask=inputs.mask),
        )
        return sum(weight * part for weight, part in zip(self.weights, parts, strict=True))


class ClassifierMaps(FeatureLoss):
    """A loss on the outputs of both linear classifiers on the last maps, before their pooling.

    The student's classifier learns, too. One pair of maps.
    """

    why_not_tokens = "looks at maps of an image"
    loss_name = ""
    head_keys = ("weight",)  # of the classifiers

    def __init__(self, layers: Mapping[str, str], student_head: str, teacher_head: str) -> None:
        super().__init__(layers)
        require_one_pair(self.loss_name, self)
        self.heads = tuple(
            tuple(f"{head}.{key}" for key in self.head_keys)
            for head in (student_head, teacher_head)
        )

    def student_layers(self) -> tuple[str, ...]:
        return (*super().student_layers(), *self.heads[0])

    def teacher_layers(self) -> tuple[str, ...]:
        return (*super().teacher_layers(), *self.heads[1])

    def get_sides(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Return `apply_head` of the student's maps and classifier, and of the teacher's."""
        student, teacher = self.get_pair(inputs, next(iter(self.layers)))
        own = get_student_features(inputs, *self.heads[0])
        theirs = get_teacher_features(inputs, *self.heads[1])
        return self._classify(student, *own), self._classify(teacher, *theirs)

    def _classify(self, maps: Tensor, *head: Tensor) -> Tensor:
        if maps.ndim != 4 or maps.shape[1] != head[0].shape[-1]:
            raise UserError(
                f"distill.losses: {self.loss_name} cannot apply a classifier of "
                f"{tuple(head[0].shape)} to activations {tuple(maps.shape)}; name the maps that "
                "are pooled before it"
            )
        return self.apply_head(maps, *head)

    def apply_head(self, maps: Tensor, *head: Tensor) -> Tensor:
        """Apply a classifier to maps [B, C, H, W]."""
        raise NotImplementedError


class ClassAttention(ClassifierMaps):
    """MSE of class activation maps, pooled to `size` squared and each of unit length.

    The map of class k is the classifier's row k times the maps. Mean over classes and positions.

    Source: Guo et al. 2023 (CAT-KD), arXiv:2304.12777, equations 2 to 5.
    """

    loss_name = "cat_kd"

    def __init__(
        self, layers: Mapping[str, str], student_head: str, teacher_head: str, size: int = 2
    ) -> None:
        super().__init__(layers, student_head, teacher_head)
        check_positive("cat_kd", size=size)
        self.size = size

    def compute(self, inputs: LossInputs) -> Tensor:
        return compute_feature_mse(*self.get_sides(inputs), mask=inputs.mask)

    def apply_head(self, maps: Tensor, weight: Tensor) -> Tensor:
        """Return [B, K, size * size] unit class activation maps; pooling and classifier commute."""
        return unit_rows(weight @ pool_adaptive(maps, self.size, self.size).flatten(2))


def require_one_pair(name: str, loss: FeatureLoss) -> None:
    """Raise a UserError for more than one pair of layers."""
    if len(loss.layers) != 1:
        raise UserError(
            f"distill.losses: {name} takes one pair of layers and got {len(loss.layers)}"
        )
