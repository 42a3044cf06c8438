"""Losses on pairs of classes: LDRLD."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from losses.base import LogitLoss
from losses.factory import check_positive, is_count
from losses.logits.kd import kl_per_example
from losses.reductions import Mask, as_constant, mean_valid, upcast
from utils.errors import UserError

# Of the weights of pairs: the paper's epsilon, delta and lambda.
NEAREST, HIGHEST, DECAY = 1.5, 2.0, 0.05


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
    pairs are summed.

    Args:
      depth: 2 or more, below K.

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
