"""Losses that use a classifier on features: WKD-L, SRRL, CAT-KD, SDD, SimKD; and NORM.

A head is the path of a linear layer, `fc` or `head`; its weights come with the activations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import one_hot

from losses.base import Layers, Loss, LossInputs, Shapes, get_teacher_logits
from losses.factory import check_positive, is_count
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
from losses.logits.kd import kl_per_example
from losses.reductions import as_constant, mean_valid, sum_terms, unit_rows, upcast
from utils.errors import UserError

MIN_FLOW = 1e-20  # keeps the divisions of Sinkhorn's algorithm finite; far below any class


def compute_class_costs(weight: Tensor, sharpness: float) -> Tensor:
    """Compute [K, K] 1 - exp(-sharpness * (1 - cosine)) of the rows of a classifier.

    Source: Lv et al. 2024 (WKD-L), arXiv:2412.08139, section 3.1; rows as the prototypes.
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
        own, theirs = (x.exp() * others for x in rest)
        distance = compute_transport(own, theirs, costs, **self.plan)
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
        layers: Layers,
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
        return sum_terms(weight * part for weight, part in zip(self.weights, parts, strict=True))


class ClassifierMaps(FeatureLoss):
    """A loss on the outputs of both linear classifiers on the last maps, before their pooling.

    The student's classifier learns, too. One pair of maps.
    """

    why_not_tokens = "looks at maps of an image"
    loss_name = ""
    head_keys = ("weight",)  # of the classifiers

    def __init__(self, layers: Layers, student_head: str, teacher_head: str) -> None:
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

    def apply_head(self, maps: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Apply a classifier to maps [B, C, H, W]."""
        raise NotImplementedError


class ClassAttention(ClassifierMaps):
    """MSE of class activation maps, pooled to `size` squared and each of unit length.

    The map of class k is the classifier's row k times the maps. Mean over classes and positions.

    Source: Guo et al. 2023 (CAT-KD), arXiv:2304.12777, equations 2 to 5.
    """

    loss_name = "cat_kd"

    def __init__(self, layers: Layers, student_head: str, teacher_head: str, size: int = 2) -> None:
        super().__init__(layers, student_head, teacher_head)
        check_positive("cat_kd", size=size)
        self.size = size

    def compute(self, inputs: LossInputs) -> Tensor:
        return compute_feature_mse(*self.get_sides(inputs), mask=inputs.mask)

    def apply_head(self, maps: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return [B, K, size * size] unit class activation maps; pooling and classifier commute."""
        return unit_rows(weight @ pool_adaptive(maps, self.size, self.size).flatten(2))


def require_one_pair(name: str, loss: FeatureLoss) -> None:
    """Raise a UserError for more than one pair of layers."""
    if len(loss.layers) != 1:
        raise UserError(
            f"distill.losses: {name} takes one pair of layers and got {len(loss.layers)}; write a "
            "term for each pair"
        )


class ScaleDecoupled(ClassifierMaps):
    """KL of the softened logits of each cell of each scale, averaged over all cells, times T^2.

    A cell counts `complement_weight` times if the teacher is right about the cell and wrong about
    the whole image, or the other way round.

    Source: Wei et al. 2024 (SDD), arXiv:2403.13512, section 3, with the mean over cells of the
    authors' code; of the losses that it can extend, this is `kd`.
    """

    loss_name = "sdd"
    head_keys = ("weight", "bias")

    def __init__(
        self,
        layers: Layers,
        student_head: str,
        teacher_head: str,
        temperature: float = 4.0,
        scales: Sequence[int] = (1, 2, 4),
        complement_weight: float = 2.0,
    ) -> None:
        super().__init__(layers, student_head, teacher_head)
        check_positive("sdd", temperature=temperature, complement_weight=complement_weight)
        is_list = isinstance(scales, Sequence) and len(scales) > 0 and scales[0] == 1
        if not is_list or not all(is_count(side, 1) for side in scales):
            raise UserError(
                f"distill.losses: sdd.scales is {scales!r}; give cells along a side, whole numbers "
                "that begin with 1, the whole image"
            )
        self.temperature, self.scales = temperature, tuple(scales)
        self.complement_weight = complement_weight

    def compute(self, inputs: LossInputs) -> Tensor:
        student, teacher = self.get_sides(inputs)
        logs = [torch.log_softmax(side / self.temperature, dim=-1) for side in (teacher, student)]
        divergence = kl_per_example(*logs)
        is_right = teacher.argmax(dim=-1) == inputs.target_classes().unsqueeze(1)
        is_complement = (is_right != is_right[:, :1]).to(divergence.dtype)
        weights = 1 + (self.complement_weight - 1) * is_complement
        return self.temperature**2 * mean_valid((weights * divergence).mean(dim=1), inputs.mask)

    def apply_head(self, maps: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return [B, cells, K] of all scales; a UserError if maps have too few cells."""
        if min(maps.shape[2:]) < max(self.scales):
            raise UserError(
                f"distill.losses: sdd.scales {list(self.scales)} ask for more cells than maps of "
                f"{tuple(maps.shape[2:])} have; leave the finer ones out"
            )
        assert bias is not None
        cells = [pool_adaptive(maps, side, side).flatten(2) for side in self.scales]
        return torch.cat(cells, dim=-1).transpose(1, 2) @ weight.T + bias


class ReusedMaps(FeatureLoss):
    """Mean squared gap of the student's projected maps and the teacher's, averaged to their size.

    For a student of `model.name: simkd`, which predicts with the teacher's classifier; this is its
    whole loss (`distill.alpha: 1`).

    Args:
      layers: the student's `projector`: the teacher's last maps, before their pooling.
      teacher_head: the linear layer on their average, which the student reuses: `fc`.

    Source: Chen et al. 2022 (SimKD), arXiv:2203.14001: one squared distance between features.
    """

    why_not_tokens = "reuses a classifier of images"

    def __init__(self, layers: Layers, teacher_head: str) -> None:
        super().__init__(layers)
        require_one_pair("simkd", self)
        self.teacher_head = teacher_head

    def teacher_layers(self) -> tuple[str, ...]:
        """Return the maps, and the classifier's weights, so that its name is checked early."""
        return (*super().teacher_layers(), f"{self.teacher_head}.weight")

    def build(self, student_shapes: Shapes, teacher_shapes: Shapes) -> None:
        """Raise a UserError for maps that cannot be compared or another network's classifier."""
        ((path, teacher_path),) = self.layers.items()
        mine, theirs = student_shapes[path], teacher_shapes[teacher_path]
        head = teacher_shapes[f"{self.teacher_head}.weight"]
        is_map = len(mine) == len(theirs) == 4
        if not is_map or theirs[1] != head[-1]:
            raise UserError(
                f"distill.losses: simkd.teacher_head ({self.teacher_head}) takes {head[-1]} "
                f"features and teacher layer {teacher_path!r} gives {tuple(theirs)}; name the maps "
                "[B, C, H, W] whose average it takes"
            )
        if mine[1] != theirs[1]:
            raise UserError(
                f"distill.losses: simkd's student has model.args.width {mine[1]} and the teacher's "
                f"classifier takes {theirs[1]}; set model.args.width to {theirs[1]}"
            )
        if mine[2] > theirs[2] or mine[3] > theirs[3]:
            raise UserError(
                f"distill.losses: simkd's student has maps of {mine[2]} x {mine[3]} and the "
                f"teacher of {theirs[2]} x {theirs[3]}; set model.args.side to {theirs[3]}"
            )

    def compute(self, inputs: LossInputs) -> Tensor:
        student, teacher = self.get_pair(inputs, next(iter(self.layers)))
        if student.shape != teacher.shape:
            teacher = pool_adaptive(teacher, *student.shape[2:])
        return compute_feature_mse(student, teacher, mask=inputs.mask)


class ManyToOne(FeatureLoss):
    """Squared gaps of the teacher's maps to each segment of the student's, summed over segments.

    For a student of `model.norm_width`, whose widened maps have N times the teacher's channels:
    segment n is channels n * C to (n + 1) * C. The larger map is reduced to the smaller by maxima
    of whole windows. Mean over the elements of a segment; other terms are added as usual. `layers`:
    `global_pool.norm_to_fc.expand` of the student: the teacher's last maps.

    Source: Liu et al. 2023 (NORM), arXiv:2305.13803, sum and maxima as in its authors' code.
    """

    why_not_tokens = "widens maps of an image"

    def __init__(self, layers: Layers) -> None:
        super().__init__(layers)
        require_one_pair("norm", self)

    def build(self, student_shapes: Shapes, teacher_shapes: Shapes) -> None:
        """Raise a UserError unless the maps have a multiple of the teacher's channels."""
        ((_, mine, theirs),) = self.pair_shapes(student_shapes, teacher_shapes)
        is_map = len(mine) == len(theirs) == 4
        if not is_map or mine[1] % theirs[1]:
            raise UserError(
                f"distill.losses: norm compares maps of a multiple of the teacher's channels and "
                f"got {tuple(mine)} and {tuple(theirs)}; set model.norm_width to the channels of "
                "the teacher's layer"
            )
        for first, second in zip(mine[2:], theirs[2:], strict=True):
            if max(first, second) % min(first, second):
                raise UserError(
                    f"distill.losses: norm cannot reduce maps of {max(first, second)} positions to "
                    f"{min(first, second)}; choose a teacher layer whose sides are multiples"
                )

    def compute(self, inputs: LossInputs) -> Tensor:
        student, teacher = self.get_pair(inputs, next(iter(self.layers)))
        sides = [min(pair) for pair in zip(student.shape[2:], teacher.shape[2:], strict=True)]
        student, teacher = (_reduce(side, sides) for side in (student, teacher))
        segments = student.unflatten(1, (-1, teacher.shape[1]))
        gaps = (segments - teacher.unsqueeze(1)).square().flatten(2).mean(dim=2)
        return mean_valid(gaps.sum(dim=1), inputs.mask)


def _reduce(maps: Tensor, sides: list[int]) -> Tensor:
    """Reduce maps to these sides by maxima of windows."""
    windows = [own // side for own, side in zip(maps.shape[2:], sides, strict=True)]
    return maps if windows == [1, 1] else functional.max_pool2d(maps, windows)
