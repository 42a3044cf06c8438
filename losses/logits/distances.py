"""big_vision's distances between logits (evaluators/proj/distill/distance.py)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from losses.base import LogitLoss, LossInputs
from losses.factory import define
from losses.reductions import as_constant, mean_valid, upcast
from utils.errors import UserError

MIN_PROB = 1e-8  # big_vision clips the teacher's probability under the logarithm


def compute_euclidean(student: Tensor, teacher: Tensor) -> Tensor:
    """Compute [B] sqrt(sum over K of d^2 + 1e-12); equal rows give 1e-6 with gradient 0."""
    return ((upcast(student) - as_constant(teacher)).square().sum(dim=-1) + 1e-12).sqrt()


def compute_l2(student: Tensor, teacher: Tensor) -> Tensor:
    """Compute [B] sum over K of squared differences; no 1/2, no 1/K."""
    return (upcast(student) - as_constant(teacher)).square().sum(dim=-1)


def compute_hard(student: Tensor, teacher: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Compute [B] KL(h || softmax(s)), h = 1 - ls at the teacher's argmax, else ls / (K - 1).

    With ls = 0 it is `compute_hard_kd`; otherwise lower than the cross-entropy by h's entropy.
    """
    num_classes = student.shape[-1]
    log_probs = torch.log_softmax(upcast(student), dim=-1)
    is_best = one_hot(teacher.detach().argmax(dim=-1), num_classes).to(log_probs.dtype)
    low = label_smoothing / (num_classes - 1)
    hard = low + (1 - label_smoothing - low) * is_best
    return (hard * (hard.clamp(min=MIN_PROB).log() - log_probs)).sum(dim=-1)


def compute_clipped_kl(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Compute [B] T^2 * KL(p_t || p_s) with log p_t clipped at log 1e-8.

    Higher than the true KL where probabilities below 1e-8 carry weight; the gradient is the same.
    FunMatch trains with it alone (Beyer et al., arXiv:2106.05237).
    """
    probs = torch.softmax(as_constant(teacher) / temperature, dim=-1)
    log_probs = torch.log_softmax(upcast(student) / temperature, dim=-1)
    per_class = probs * (probs.clamp(min=MIN_PROB).log() - log_probs)
    return temperature**2 * per_class.sum(dim=-1)


def compute_log_softmax_euclidean(student: Tensor, teacher: Tensor) -> Tensor:
    """Compute [B] Euclidean distances of the log-distributions at temperature 1."""
    return compute_euclidean(
        torch.log_softmax(upcast(student), dim=-1), torch.log_softmax(as_constant(teacher), dim=-1)
    )


def compute_agreement(student: Tensor, teacher: Tensor, top_k: int) -> Tensor:
    """Return [B] 1 if the teacher's best class is among the student's k best, else 0; no gradient.

    Its mean is a share to log with weight 0. Equal logits rank by class index.
    """
    student = as_constant(student)
    best = teacher.detach().argmax(dim=-1, keepdim=True)
    score = student.gather(-1, best)
    position = torch.arange(student.shape[-1], device=student.device)
    ahead = (student > score) | ((student == score) & (position < best))
    return (ahead.sum(dim=-1) < top_k).to(student.dtype)


class Distance(LogitLoss):
    """Mean over valid examples of one distance, a function without a mask."""

    def compare(self, student: Tensor, teacher: Tensor, inputs: LossInputs) -> Tensor:
        return mean_valid(self.function(student, teacher, **self.arguments), inputs.mask)


class LogitDistance(Distance):
    """A distance that depends on the logits' offset, which stored log-probabilities have lost."""

    takes_numbers = True

    def compute(self, inputs: LossInputs) -> Tensor:
        if inputs.sparse_teacher is not None and not inputs.teacher_logits:
            raise UserError(
                "distill.losses: bv_euclidean and bv_l2 compare raw logits and a teacher cache "
                "stores probabilities; use bv_logsoftmax_euclidean or a live teacher"
            )
        return super().compute(inputs)


create_euclidean = define(LogitDistance, "bv_euclidean", compute_euclidean)
create_l2 = define(LogitDistance, "bv_l2", compute_l2)
create_clipped_kl = define(Distance, "bv_kl", compute_clipped_kl, "temperature", temperature=1.0)
create_log_softmax_euclidean = define(
    Distance, "bv_logsoftmax_euclidean", compute_log_softmax_euclidean
)
create_agreement = define(Distance, "bv_agree", compute_agreement, "top_k", top_k=1)


def create_hard(label_smoothing: float = 0.0) -> Distance:
    if not 0 <= label_smoothing < 1:
        raise UserError(
            f"distill.losses: bv_hard.label_smoothing is {label_smoothing!r}; give 0 <= value < 1"
        )
    return Distance(compute_hard, label_smoothing=label_smoothing)
