"""Losses that separate some classes from the others: DKD, NKD, WSLD, RLD, LDRLD."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, one_hot

from losses.base import LogitLoss, TargetLoss
from losses.factory import check_positive, define, is_count, weigh_parts
from losses.logits.kd import kl_per_example
from losses.reductions import Mask, as_constant, mean_valid, upcast
from utils.errors import UserError

# Of the weights of pairs: the paper's epsilon, delta and lambda.
NEAREST, HIGHEST, DECAY = 1.5, 2.0, 0.05


def split_log_probs(logits: Tensor, classes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log-probabilities of the target, of all others together, and among the others.

    `logits`: [B, K], K >= 2, already divided by the temperature.

    Returns:
      [B] log p_y; [B] log(1 - p_y), by log-sum-exp and so exact where p_y rounds to 1; [B, K] log
      softmax over the classes other than y, with 0 at y.

    The references exclude y by subtracting 1000 after the division by T; here it is exact, which
    differs only if logits / T spread over nearly 1000.
    """
    is_target = one_hot(classes.long(), logits.shape[-1]).bool()
    lowest = torch.finfo(logits.dtype).min
    others = torch.logsumexp(logits.masked_fill(is_target, lowest), dim=-1, keepdim=True)
    target = logits.gather(-1, classes.long().unsqueeze(-1))
    margin = (target - others).squeeze(-1)
    among_others = (logits - others).masked_fill(is_target, 0.0)
    return logsigmoid(margin), logsigmoid(-margin), among_others


def _get_other_probs(among_others: Tensor, classes: Tensor) -> Tensor:
    is_target = one_hot(classes.long(), among_others.shape[-1]).bool()
    return among_others.exp().masked_fill(is_target, 0.0)


def compute_dkd_parts(
    student_logits: Tensor,
    teacher_logits: Tensor,
    classes: Tensor,
    temperature: float,
    *,
    mask: Mask = None,
) -> tuple[Tensor, Tensor]:
    """Compute target-class (TCKD) and non-target-class (NCKD) distillation.

    Returns:
      Two scalars: KL of (p_y, 1 - p_y), and KL among the classes other than y. For each example,
      kd = TCKD + (1 - p_y of the teacher) * NCKD.

    Source: Zhao et al. 2022, arXiv:2203.08679, section 3. mdistiller, OFAKD and cls_KD agree.
    """
    target, rest, among = split_log_probs(as_constant(teacher_logits) / temperature, classes)
    parts = split_log_probs(upcast(student_logits) / temperature, classes)
    student_target, student_rest, student_among = parts
    tckd = target.exp() * (target - student_target) + rest.exp() * (rest - student_rest)
    nckd = (_get_other_probs(among, classes) * (among - student_among)).sum(dim=-1)
    scale = temperature**2
    return scale * mean_valid(tckd, mask), scale * mean_valid(nckd, mask)


# No warm-up factor: the reference's first 20 epochs are a schedule of the weight.
compute_dkd = weigh_parts(compute_dkd_parts, "alpha", "beta")


def compute_nkd(
    student_logits: Tensor,
    teacher_logits: Tensor,
    classes: Tensor,
    *,
    temperature: float,
    gamma: float,
    mask: Mask = None,
) -> Tensor:
    """Compute normalised KD: -p_t(y) log p_s(y) - gamma T^2 sum over c != y of q_t log q_s.

    p is at temperature 1 and q, normalised among the classes other than y, at `temperature`. This
    is the cross-entropy form: equal logits do not give 0. The task's cross-entropy is not included.

    Source: Yang et al. 2023, arXiv:2303.13005. Copies of cls_KD from July to October 2023 do not
    exclude the target class and give other values.
    """
    teacher = as_constant(teacher_logits)
    student = upcast(student_logits)
    index = classes.long().unsqueeze(-1)
    target = torch.softmax(teacher, dim=-1).gather(-1, index).squeeze(-1)
    student_target = torch.log_softmax(student, dim=-1).gather(-1, index).squeeze(-1)
    probs = _get_other_probs(split_log_probs(teacher / temperature, classes)[2], classes)
    student_among = split_log_probs(student / temperature, classes)[2]
    others = -(probs * student_among).sum(dim=-1)
    return mean_valid(gamma * temperature**2 * others - target * student_target, mask)


def compute_wsld(
    student_logits: Tensor,
    teacher_logits: Tensor,
    classes: Tensor,
    temperature: float,
    *,
    mask: Mask = None,
) -> Tensor:
    """Compute the soft-label cross-entropy, weighted by 1 - exp(-L_student / L_teacher).

    L is each example's cross-entropy with the label (the paper's are hard) at temperature 1; the
    weight has no gradient. cls_KD multiplies by 2.25 inside: that is the term's weight here.

    Source: Zhou et al. 2021, arXiv:2102.00650.
    """
    teacher = as_constant(teacher_logits)
    student = upcast(student_logits)
    index = classes.long().unsqueeze(-1)
    student_loss = -torch.log_softmax(student.detach(), dim=-1).gather(-1, index).squeeze(-1)
    teacher_loss = -torch.log_softmax(teacher, dim=-1).gather(-1, index).squeeze(-1)
    weight = -torch.expm1(-(student_loss / (teacher_loss + 1e-7)).clamp(min=0))
    probs = torch.softmax(teacher / temperature, dim=-1)
    log_probs = torch.log_softmax(student / temperature, dim=-1)
    return temperature**2 * mean_valid(-weight * (probs * log_probs).sum(dim=-1), mask)


def compute_rld_parts(
    student_logits: Tensor,
    teacher_logits: Tensor,
    classes: Tensor,
    temperature: float,
    *,
    confidence_temperature: float,
    mask: Mask = None,
) -> tuple[Tensor, Tensor]:
    """Compute sample confidence (SCD) and masked correlation (MCD), robust to a wrong teacher.

    SCD: KL of (p_max, 1 - p_max) of the teacher's best class and (q_y, 1 - q_y) of the student's
    target class. MCD: KL among the classes that are less likely than y to the teacher, or 0
    without such classes. SCD has the temperature `confidence_temperature`.

    Source: Sun et al. 2024 (Refined Logits), arXiv:2408.07703, equations 6 to 10.
    """
    teacher, student = as_constant(teacher_logits), upcast(student_logits)
    best = teacher.argmax(dim=-1)
    sure, unsure, _ = split_log_probs(teacher / confidence_temperature, best)
    own, rest, _ = split_log_probs(student / confidence_temperature, classes)
    scd = sure.exp() * (sure - own) + unsure.exp() * (unsure - rest)
    hidden = teacher >= teacher.gather(-1, classes.long().unsqueeze(-1))
    among = _get_log_probs_among(teacher / temperature, hidden)
    student_among = _get_log_probs_among(student / temperature, hidden)
    probs = among.exp().masked_fill(hidden, 0.0)
    mcd = (probs * (among - student_among)).sum(dim=-1)
    return confidence_temperature**2 * mean_valid(scd, mask), temperature**2 * mean_valid(mcd, mask)


def _get_log_probs_among(logits: Tensor, hidden: Tensor) -> Tensor:
    """Compute [B, K] log-softmax over the classes that are not hidden, with 0 at the hidden."""
    lowest = torch.finfo(logits.dtype).min
    total = torch.logsumexp(logits.masked_fill(hidden, lowest), dim=-1, keepdim=True)
    nothing_left = hidden.all(dim=-1, keepdim=True)
    return (logits - total.masked_fill(nothing_left, 0.0)).masked_fill(hidden, 0.0)


compute_rld = weigh_parts(compute_rld_parts, "alpha", "beta")


create_dkd = define(
    TargetLoss, "dkd", compute_dkd, "temperature", temperature=4.0, alpha=1.0, beta=8.0
)
create_nkd = define(TargetLoss, "nkd", compute_nkd, "temperature", temperature=1.0, gamma=1.5)
create_wsld = define(TargetLoss, "wsld", compute_wsld, "temperature", temperature=2.0)


def create_rld(
    temperature: float = 4.0,
    alpha: float = 1.0,
    beta: float = 1.0,
    confidence_temperature: float | None = None,
) -> TargetLoss:
    """Create `rld`; `confidence_temperature` None is `temperature`. The paper tunes alpha, beta."""
    given = temperature if confidence_temperature is None else confidence_temperature
    check_positive("rld", temperature=temperature, confidence_temperature=given)
    arguments = {"temperature": temperature, "confidence_temperature": given}
    return TargetLoss(compute_rld, alpha=alpha, beta=beta, **arguments)


def compute_pair_weights(depth: int, like: Tensor) -> Tensor:
    """Return [d, d] weights of pairs of ranks i < j from 1 on, 0 elsewhere, on `like`'s device.

    2 exp(-0.05 (i + j)) / (j - i + 1.5): near ranks and high ranks weigh more.
    """
    ranks = torch.arange(1, depth + 1, device=like.device).to(like.dtype)
    gap = ranks - ranks.unsqueeze(1)
    weights = HIGHEST * (-DECAY * (ranks + ranks.unsqueeze(1))).exp() / (gap.abs() + NEAREST)
    return weights * (gap > 0).to(like.dtype)


def compute_rest(student: Tensor, teacher: Tensor, is_top: Tensor) -> Tensor:
    """Compute [B] KL between the distributions among the classes that are not marked."""
    lowest = torch.finfo(student.dtype).min
    among = []
    for logits in (student, teacher):
        others = torch.logsumexp(logits.masked_fill(is_top, lowest), dim=-1, keepdim=True)
        among.append((logits - others).masked_fill(is_top, 0.0))
    probs = among[1].exp().masked_fill(is_top, 0.0)
    return (probs * (among[1] - among[0])).sum(dim=-1)


def compute_ldrld_parts(
    student_logits: Tensor,
    teacher_logits: Tensor,
    temperature: float,
    *,
    depth: int,
    mask: Mask = None,
) -> tuple[Tensor, Tensor]:
    """Compute KL of pairs of the student's best classes + KL among these, and KL among the rest.

    The student's `depth` best classes, whose ranks have no gradient, make depth (depth - 1) / 2
    pairs; each pair is a distribution of two classes, weighted by `compute_pair_weights`, and the
    pairs are summed. `depth`: 2 or more, below K.

    Source: Xu et al. 2025 (LDRLD), arXiv:2507.15911, section 3; T^2 as in its authors' code.
    """
    if depth >= student_logits.shape[-1]:
        raise UserError(
            f"distill.losses: ldrld.depth ({depth}) must be less than the number of classes "
            f"({student_logits.shape[-1]}); choose a smaller one"
        )
    student, teacher = upcast(student_logits) / temperature, as_constant(teacher_logits)
    teacher = teacher / temperature
    best = student.detach().topk(depth, dim=-1).indices
    top = student.gather(-1, best), teacher.gather(-1, best)
    gaps = [side.unsqueeze(2) - side.unsqueeze(1) for side in top]
    first = gaps[1].sigmoid() * (logsigmoid(gaps[1]) - logsigmoid(gaps[0]))
    second = (-gaps[1]).sigmoid() * (logsigmoid(-gaps[1]) - logsigmoid(-gaps[0]))
    pairs = (compute_pair_weights(depth, student) * (first + second)).sum(dim=(1, 2))
    logs = [torch.log_softmax(side, dim=-1) for side in top]
    among = kl_per_example(logs[1], logs[0])
    is_top = torch.zeros_like(teacher).scatter(-1, best, 1.0).bool()
    rest = compute_rest(student, teacher, is_top)
    local, left = (mean_valid(part, mask) for part in (pairs + among, rest))
    return temperature**2 * local, temperature**2 * left


compute_ldrld = weigh_parts(compute_ldrld_parts, "alpha", "beta")


def create_ldrld(
    temperature: float = 4.0, depth: int = 7, alpha: float = 1.0, beta: float = 1.0
) -> LogitLoss:
    check_positive("ldrld", temperature=temperature)
    if not is_count(depth, 2):
        raise UserError(
            f"distill.losses: ldrld.depth is {depth!r}; give a whole number of 2 or more"
        )
    return LogitLoss(compute_ldrld, temperature=temperature, depth=depth, alpha=alpha, beta=beta)
