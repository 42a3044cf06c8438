"""Losses on relations of examples, classes and two views of an example: CRLD, MLKD."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from losses.base import LogitLoss, Loss, LossInputs, get_strong_logits, get_teacher_logits
from losses.factory import check_positive
from losses.logits.kd import kd_kl_div, kl_per_example
from losses.logits.standardise import standardise_logits
from losses.reductions import (
    Mask,
    as_constant,
    get_group_weights,
    mean_groups,
    mean_valid,
    soften,
    split_groups,
    sum_terms,
    upcast,
)
from utils.errors import UserError

BASE_TEMPERATURES = (3.0, 5.0)  # the reference's, beside its configured one
SURE_MARGIN = 53 * math.log(2.0)  # where p rounds to 1 in float64
WEAK_TEMPERATURES = (2.0, 6.0)  # in these the reference's strong sum sees the weak view


def compute_row_kl(student_logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """Compute [B] T^2 KL(teacher || student) of softened distributions."""
    return temperature**2 * kl_per_example(*soften(student_logits, teacher_logits, temperature))


class CrossViewKD(Loss):
    """Consistency-regularised logit distillation, without its cross-entropy.

    within * mean of [c_w >= weak_confidence] (kd(s_w, t_w) + kd(s_s, t_s)) +
    across * mean of [c_s >= strong_confidence] (kd(s_s, t_w) + kd(s_w, t_s)): w is the weak view
    and s the strong one, c the teacher's largest probability of a view at T = 1. Examples that are
    left out still count in the mean. The authors' code is followed, which masks the two kinds of
    term by one view each.

    Source: Zhang et al. 2024, ACM MM, arXiv:2412.16493.
    """

    why_not_tokens = "compares two views of an example"
    needs_strong_view = True

    def __init__(
        self,
        weak_confidence: float,
        strong_confidence: float,
        temperature: float = 4.0,
        within: float = 1.0,
        across: float = 1.0,
    ) -> None:
        super().__init__()
        check_positive("crld", temperature=temperature, within=within, across=across)
        limits = {"weak_confidence": weak_confidence, "strong_confidence": strong_confidence}
        for key, value in limits.items():
            if not 0 <= value <= 1:
                raise UserError(
                    f"distill.losses: crld.{key} must be a probability from 0 to 1, got {value!r}"
                )
        self.temperature, self.within, self.across = temperature, within, across
        self.weak_confidence, self.strong_confidence = weak_confidence, strong_confidence

    def compute(self, inputs: LossInputs) -> Tensor:
        weak, weak_teacher = inputs.student_logits, get_teacher_logits(inputs)
        strong, strong_teacher = get_strong_logits(inputs, "crld")

        def kd(student: Tensor, teacher: Tensor) -> Tensor:
            return compute_row_kl(student, teacher, self.temperature)

        within = kd(weak, weak_teacher) + kd(strong, strong_teacher)
        across = kd(strong, weak_teacher) + kd(weak, strong_teacher)
        within = within * _is_sure(weak_teacher, self.weak_confidence)
        across = across * _is_sure(strong_teacher, self.strong_confidence)
        return mean_valid(self.within * within + self.across * across, inputs.mask)


def _is_sure(teacher_logits: Tensor, confidence: float) -> Tensor:
    """Return [B] 1 if the teacher's best class has at least that probability, else 0."""
    best = torch.softmax(as_constant(teacher_logits), dim=-1).amax(dim=-1)
    return (best >= confidence).to(best.dtype)


def compute_batch_consistency(
    student_logits: Tensor,
    teacher_logits: Tensor,
    temperature: float,
    *,
    group_size: int = 0,
    mask: Mask = None,
) -> Tensor:
    """Compute ||P_t P_t' - P_s P_s'||_F^2 / g, the distance of the Gram matrices of examples.

    Summed over the g * g matrix, divided by the valid examples once, averaged over groups. There is
    no T^2 factor.

    Source: Jin, Wang and Lin 2023 (MLKD), CVPR 2023, equation 5; as coded in mdistiller's fork.
    """
    sides = student_logits, teacher_logits
    student, teacher, weights = _get_group_probs(*sides, temperature, group_size, mask)
    difference = teacher @ teacher.transpose(1, 2) - student @ student.transpose(1, 2)
    counts = weights.sum(dim=1).clamp(min=1)
    return mean_groups(difference.square().sum(dim=(1, 2)) / counts, weights)


def compute_class_consistency(
    student_logits: Tensor,
    teacher_logits: Tensor,
    temperature: float,
    *,
    group_size: int = 0,
    mask: Mask = None,
) -> Tensor:
    """Compute ||P_t' P_t - P_s' P_s||_F^2 / K, the distance of the Gram matrices of classes.

    Summed over the K * K matrix, divided by K once and not by the examples, averaged over groups.
    It grows with the square of the group and has no T^2 factor.

    Source: Jin, Wang and Lin 2023 (MLKD), CVPR 2023, equation 7; as coded in mdistiller's fork.
    """
    sides = student_logits, teacher_logits
    student, teacher, weights = _get_group_probs(*sides, temperature, group_size, mask)
    difference = teacher.transpose(1, 2) @ teacher - student.transpose(1, 2) @ student
    return mean_groups(difference.square().sum(dim=(1, 2)) / student.shape[-1], weights)


def compute_low_share(scores: Tensor, mask: Tensor) -> Tensor:
    """Return [G] share of the scores [G, N] of `mask` at or below their median, as numpy has it."""
    ranked = torch.sort(scores.masked_fill(~mask, torch.finfo(scores.dtype).max), dim=-1).values
    count = mask.sum(dim=-1, keepdim=True)
    middle = ranked.gather(-1, (count - 1).clamp(min=0) // 2)
    return (((scores <= middle) & mask).sum(dim=-1, keepdim=True) / count.clamp(min=1)).squeeze(-1)


def compute_low_confidence_shares(teacher_logits: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return [G] shares of examples and of classes whose teacher confidence is at most the median.

    Of logits [G, g, K] and a mask [G, g] of valid examples. Examples rank by log(p / (1 - p)) of
    their best class, so that float32 separates p = 1 - 1e-9 from 1 as the reference does; those
    whose p is 1 in float64 are equal.
    """
    logits = as_constant(teacher_logits)
    lowest = torch.finfo(logits.dtype).min
    best = logits.argmax(dim=-1, keepdim=True)
    others = torch.logsumexp(logits.scatter(-1, best, lowest), dim=-1)
    margins = (logits.gather(-1, best).squeeze(-1) - others).clamp(max=SURE_MARGIN)
    log_probs = torch.log_softmax(logits, dim=-1).masked_fill(~mask.unsqueeze(-1), lowest)
    class_mass = torch.logsumexp(log_probs, dim=1)
    every_class = torch.ones_like(class_mass, dtype=torch.bool)
    return compute_low_share(margins, mask), compute_low_share(class_mass, every_class)


class BatchConsistency(LogitLoss):
    """`compute_batch_consistency`; targets are not used."""

    why_not_tokens = "compares the examples of a group with each other"
    function = staticmethod(compute_batch_consistency)

    def __init__(self, temperature: float = 4.0, group_size: int = 0) -> None:
        check_positive("mlkd_bc", temperature=temperature)
        super().__init__(self.function, temperature=temperature, group_size=group_size)


class ClassConsistency(BatchConsistency):
    """`compute_class_consistency`; targets are not used."""

    why_not_tokens = "correlates the classes over the examples of a group"
    function = staticmethod(compute_class_consistency)


class MultiLevelKD(Loss):
    """MLKD's whole objective as its reference code computes it, without the cross-entropy.

    weight * (f * kd(weak, all T) + kd(strong, T, 3, 5) + kd(weak, 2, 6) + c * cc(weak, all T) +
    f * bc(weak, all T)), all T = T, 3, 5, 2, 6; f and c are the shares of examples and classes
    with at most median teacher confidence, in each group. The paper selects those examples and
    classes; its code, which is followed, reduces first, so that its masks only scale by about 0.5.
    The parts are also available as kd, mlkd_bc and mlkd_cc.

    Source: Jin, Wang and Lin 2023 (MLKD), CVPR 2023.
    """

    why_not_tokens = "compares the examples of a group, and two views of them"
    needs_strong_view = True

    def __init__(
        self,
        temperature: float = 4.0,
        standardise: bool = False,
        weight: float = 1.0,
        group_size: int = 0,
    ) -> None:
        super().__init__()
        check_positive("mlkd", temperature=temperature)
        self.base_temperatures = (float(temperature), *BASE_TEMPERATURES)
        self.standardise = standardise
        self.weight = weight
        self.group_size = group_size

    def compute(self, inputs: LossInputs) -> Tensor:
        return self.weight * sum_terms(self.compute_parts(inputs).values())

    def compute_parts(self, inputs: LossInputs) -> dict[str, Tensor]:
        """Compute the scalars `kd`, `cc` and `bc`, before `weight`."""
        student = inputs.student_logits
        teacher = get_teacher_logits(inputs)
        strong_student, strong_teacher = get_strong_logits(inputs, "mlkd")
        weights = get_group_weights(teacher, inputs.mask, self.group_size)
        shares = compute_low_confidence_shares(split_groups(teacher, self.group_size), weights > 0)
        low_examples, low_classes = (mean_groups(share, weights) for share in shares)
        every = (*self.base_temperatures, *WEAK_TEMPERATURES)
        arguments = {"group_size": self.group_size, "mask": inputs.mask}

        def kd(first: Tensor, second: Tensor, temperatures: tuple[float, ...]) -> Tensor:
            if self.standardise:
                first, second = standardise_logits(first), standardise_logits(second)
            return sum_terms(kd_kl_div(first, second, t, mask=inputs.mask) for t in temperatures)

        soft = low_examples * kd(student, teacher, every)
        soft = soft + kd(strong_student, strong_teacher, self.base_temperatures)
        soft = soft + kd(student, teacher, WEAK_TEMPERATURES)
        cc = sum(compute_class_consistency(student, teacher, t, **arguments) for t in every)
        bc = sum(compute_batch_consistency(student, teacher, t, **arguments) for t in every)
        return {"kd": soft, "cc": low_classes * cc, "bc": low_examples * bc}


def _get_group_probs(
    student_logits: Tensor, teacher_logits: Tensor, temperature: float, group_size: int, mask: Mask
) -> tuple[Tensor, Tensor, Tensor]:
    """Return [G, g, K] probabilities of both sides, 0 for masked examples, and [G, g] weights."""
    weights = get_group_weights(student_logits, mask, group_size)
    student = torch.softmax(upcast(student_logits) / temperature, dim=-1)
    teacher = torch.softmax(as_constant(teacher_logits) / temperature, dim=-1)
    student = split_groups(student, group_size) * weights.unsqueeze(-1)
    return student, split_groups(teacher, group_size) * weights.unsqueeze(-1), weights
