"""Divergences of whole distributions besides KL: reverse KL, JSD, alpha-beta, yes or no."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from losses.base import LogitLoss, LossInputs
from losses.factory import check_choice, check_positive, define, is_number
from losses.logits.kd import REDUCTIONS, kl_per_example
from losses.reductions import Mask, as_constant, mean_valid, soften, upcast
from losses.tasks.yes_or_no import compute_bce
from utils.errors import UserError


def compute_reverse_kl(
    student_logits: Tensor, teacher_logits: Tensor, temperature: float, *, mask: Mask = None
) -> Tensor:
    """Compute KL(student || teacher) of softened distributions, which seeks the teacher's modes.

    Source: Gu et al. 2024 (MiniLLM), arXiv:2306.08543, equation 1, for each token of given texts;
    the paper samples them from the student.
    """
    log_probs, student_log_probs = soften(student_logits, teacher_logits, temperature)
    return temperature**2 * mean_valid(kl_per_example(student_log_probs, log_probs), mask)


def compute_generalised_jsd(
    student_logits: Tensor,
    teacher_logits: Tensor,
    temperature: float,
    *,
    beta: float,
    mask: Mask = None,
) -> Tensor:
    """Compute beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q.

    p is the teacher, q the student. beta 1/2 is the Jensen-Shannon divergence; divided by beta it
    goes to KL(p || q) as beta goes to 0, divided by 1 - beta to KL(q || p) as beta goes to 1. The
    student's gradient flows through m as well. In nats, at most T^2 log 2.

    Args:
      beta: 0 < beta < 1.

    Source: Agarwal et al. 2024 (GKD), arXiv:2306.13649, equation 1, for given texts.
    """
    log_probs, student_log_probs = soften(student_logits, teacher_logits, temperature)
    both = [log_probs + math.log(beta), student_log_probs + math.log1p(-beta)]
    mixture = torch.logsumexp(torch.stack(both), dim=0)
    per_example = beta * kl_per_example(log_probs, mixture)
    per_example = per_example + (1 - beta) * kl_per_example(student_log_probs, mixture)
    return temperature**2 * mean_valid(per_example, mask)


def compute_alpha_beta(
    student_logits: Tensor,
    teacher_logits: Tensor,
    temperature: float,
    *,
    alpha: float,
    beta: float,
    mask: Mask = None,
) -> Tensor:
    """Compute the alpha-beta divergence of the teacher's p and the student's q, softened alike.

    D = -1 / (alpha beta) sum of p^alpha q^beta - (alpha p^(alpha + beta) + beta q^(alpha + beta))
    / (alpha + beta), and its limits where a power is 0: beta 0 gives the sum of
    (p^alpha log(p^alpha / q^alpha) - p^alpha + q^alpha) / alpha^2, alpha 0 the same with the sides
    exchanged, both 0 half the squared gap of the log-probabilities. (1, 0) is KL(p || q), (0, 1)
    is KL(q || p). There is no T^2 factor.

    Args:
      alpha: >= 0, power on the teacher; the larger, the more its confident classes count.
      beta: >= 0, power on the student; the larger, the more its own confident classes count.

    Source: Wang et al. 2025 (ABKD), arXiv:2505.04560, definition 3.1; its limits after Cichocki et
    al. 2011. The term's weight of 32 in its code is not inside.
    """
    p, q = soften(student_logits, teacher_logits, temperature)
    both = alpha + beta
    if alpha and beta:
        sides = alpha * (both * p).exp() + beta * (both * q).exp()
        per_class = (sides / both - (alpha * p + beta * q).exp()) / (alpha * beta)
    elif both:
        first, second = (both * p, both * q) if alpha else (both * q, both * p)
        per_class = (first.exp() * (first - second - 1) + second.exp()) / both**2
    else:
        per_class = (p - q).square() / 2
    return mean_valid(per_class.sum(dim=-1), mask)


def compute_yes_or_no_kd(
    student_logits: Tensor, teacher_logits: Tensor, *, mask: Mask = None
) -> Tensor:
    """Compute the cross-entropy of K yes-or-no decisions with the teacher's sigmoids.

    The offset of the teacher's logits counts.

    Source: Touvron et al. 2022 (cosub), arXiv:2212.04884, its loss between submodels whose task
    loss is binary cross-entropy.
    """
    shares = torch.sigmoid(as_constant(teacher_logits))
    return mean_valid(compute_bce(upcast(student_logits), shares).sum(dim=-1), mask)


class YesOrNoKD(LogitLoss):
    """`compute_yes_or_no_kd`; reduction `numel` also divides by K, like train.task_loss: bce."""

    def __init__(self, reduction: str = "batchmean") -> None:
        check_choice("bce_kd", "reduction", reduction, REDUCTIONS)
        super().__init__(compute_yes_or_no_kd, reduction=reduction)

    def compute(self, inputs: LossInputs) -> Tensor:
        if inputs.sparse_teacher is not None and not inputs.teacher_logits:
            raise UserError(
                "distill.losses: bce_kd takes the sigmoid of raw logits and a teacher cache stores "
                "probabilities over classes; use kd or a live teacher"
            )
        return super().compute(inputs)


create_reverse_kl = define(
    LogitLoss, "reverse_kl", compute_reverse_kl, "temperature", temperature=4.0
)


def create_generalised_jsd(temperature: float = 4.0, beta: float = 0.5) -> LogitLoss:
    check_positive("jsd", temperature=temperature)
    if not is_number(beta) or not 0 < beta < 1:
        raise UserError(
            f"distill.losses: jsd.beta is {beta!r}; give 0 < value < 1 (kd and reverse_kl are its "
            "ends)"
        )
    return LogitLoss(compute_generalised_jsd, temperature=temperature, beta=beta)


def create_alpha_beta(temperature: float = 4.0, alpha: float = 0.9, beta: float = 0.2) -> LogitLoss:
    check_positive("abkd", temperature=temperature)
    for key, value in (("alpha", alpha), ("beta", beta)):
        if not is_number(value, 0):
            raise UserError(
                f"distill.losses: abkd.{key} is {value!r}; give a number of 0 or more (alpha 1 "
                "with beta 0 is kd without its T^2)"
            )
    return LogitLoss(compute_alpha_beta, temperature=temperature, alpha=alpha, beta=beta)
