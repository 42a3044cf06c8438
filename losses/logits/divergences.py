"""Divergences and distances besides KL: reverse KL, JSD, alpha-beta, yes or no, big_vision's.

The distances are those of big_vision's evaluators/proj/distill/distance.py.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from losses.base import LogitLoss, LossInputs
from losses.factory import check_choice, check_positive, define, is_number
from losses.logits.kd import REDUCTIONS, kl_per_example
from losses.reductions import Mask, as_constant, mean_valid, soften, upcast
from losses.tasks.classes import compute_bce
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
    student's gradient flows through m as well. In nats, at most T^2 log 2. `beta`: 0 < beta < 1.

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

    def get_distance(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Compute [B] distances."""
        return self.function(student, teacher, **self.arguments)

    def compare(self, student: Tensor, teacher: Tensor, inputs: LossInputs) -> Tensor:
        return mean_valid(self.get_distance(student, teacher), inputs.mask)


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
