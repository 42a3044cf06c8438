"""Consistency of two views of an example: within each, and from one to the other."""

from __future__ import annotations

import torch
from torch import Tensor

from losses.base import Loss, LossInputs, get_strong_logits, get_teacher_logits
from losses.factory import check_positive
from losses.logits.kd import kl_per_example
from losses.reductions import as_constant, mean_valid, soften
from utils.errors import UserError


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
