"""Losses on whole class distributions: soft and hard labels, DeiT's tokens, stored teachers."""

from __future__ import annotations

import torch
from torch import Tensor

from losses.base import LogitLoss, Loss, LossInputs, SparseTeacher
from losses.factory import check_choice, check_positive
from losses.reductions import Mask, as_constant, mean_valid, soften, upcast
from utils.errors import UserError

REDUCTIONS = ("batchmean", "numel")
FORMS = ("kl", "cross_entropy")


def soft_cross_entropy(student_logits: Tensor, targets: Tensor, *, mask: Mask = None) -> Tensor:
    """Compute the cross-entropy with soft targets [B, K], whose rows sum to 1: the task loss."""
    log_probs = torch.log_softmax(upcast(student_logits), dim=-1)
    per_example = -(as_constant(targets).to(log_probs.dtype) * log_probs).sum(dim=-1)
    return mean_valid(per_example, mask)


def kl_per_example(log_probs: Tensor, student_log_probs: Tensor) -> Tensor:
    """Compute [B] KL(p || q) of log-distributions; F.kl_div has no XLA gradient kernel."""
    return (log_probs.exp() * (log_probs - student_log_probs)).sum(dim=-1)


def kd_kl_div(
    student_logits: Tensor, teacher_logits: Tensor, temperature: float, *, mask: Mask = None
) -> Tensor:
    """Compute KL(teacher || student) of softened class distributions.

    DeiT and LeViT divide by B * K instead of B, which gives 1/K of it.

    Source: Hinton, Vinyals and Dean 2015, arXiv:1503.02531, section 2.
    """
    logs = soften(student_logits, teacher_logits, temperature)
    return temperature**2 * mean_valid(kl_per_example(*logs), mask)


def compute_soft_label_cross_entropy(
    student_logits: Tensor, teacher_logits: Tensor, temperature: float, *, mask: Mask = None
) -> Tensor:
    """Compute the cross-entropy form of `kd_kl_div`, higher by T^2 times the teacher's entropy.

    The gradient is the same. Source: yzd-v/cls_KD and TinyViT have this form.
    """
    probs = torch.softmax(as_constant(teacher_logits) / temperature, dim=-1)
    student_log_probs = torch.log_softmax(upcast(student_logits) / temperature, dim=-1)
    return temperature**2 * mean_valid(-(probs * student_log_probs).sum(dim=-1), mask)


def compute_hard_kd(
    student_logits: Tensor, teacher_logits: Tensor, label_smoothing: float, *, mask: Mask = None
) -> Tensor:
    """Compute the cross-entropy with the teacher's best class, at temperature 1.

    `label_smoothing`: mass spread over all K classes, as in timm and torch. big_vision spreads it
    over the K - 1 other classes and subtracts the entropy: see `bv_hard`.

    Source: Touvron et al. 2021 (DeiT), arXiv:2012.12877, section 4.
    """
    log_probs = torch.log_softmax(upcast(student_logits), dim=-1)
    classes = teacher_logits.detach().argmax(dim=-1, keepdim=True)
    per_example = -log_probs.gather(-1, classes).squeeze(-1)
    if label_smoothing:
        per_example = (1 - label_smoothing) * per_example - label_smoothing * log_probs.mean(-1)
    return mean_valid(per_example, mask)


class SoftKD(LogitLoss):
    """`kd_kl_div`; reduction `numel` also divides by K; form `cross_entropy` keeps the entropy."""

    def __init__(
        self, temperature: float = 4.0, reduction: str = "batchmean", form: str = "kl"
    ) -> None:
        check_positive("kd", temperature=temperature)
        check_choice("kd", "reduction", reduction, REDUCTIONS)
        check_choice("kd", "form", form, FORMS)
        function = kd_kl_div if form == "kl" else compute_soft_label_cross_entropy
        super().__init__(function, reduction=reduction, temperature=temperature)


class HardKD(LogitLoss):
    """`compute_hard_kd` on the class head."""

    def __init__(self, label_smoothing: float = 0.0) -> None:
        if not 0 <= label_smoothing < 1:
            raise UserError(
                f"distill.losses: label_smoothing is {label_smoothing!r}; give 0 <= value < 1"
            )
        super().__init__(compute_hard_kd, label_smoothing=label_smoothing)


class DistillTokenLoss(LogitLoss):
    """A logit loss on the distillation token; the class token learns the task alone."""

    why_not_tokens = "needs a distillation token, which a language model does not have"

    def needs_distill_token(self) -> bool:
        return True

    def get_student_logits(self, inputs: LossInputs) -> Tensor:
        if inputs.student_distill_logits is None:
            raise UserError(
                "distill.losses: deit_soft and deit_hard need a student with a distillation token; "
                "set model.name to one (deit_small_distilled_patch16_224) or use kd or hard"
            )
        return inputs.student_distill_logits


class DeitSoft(DistillTokenLoss, SoftKD):
    """`kd` on the distillation token; DeiT divides by B * K, as reduction `numel` does.

    Source: Touvron et al. 2021 (DeiT), arXiv:2012.12877, section 4.
    """


class DeitHard(DistillTokenLoss, HardKD):
    """`hard` on the distillation token; its source is that of `DeitSoft`."""


def compute_sparse_cross_entropy(
    student_logits: Tensor, teacher: SparseTeacher, *, mask: Mask = None
) -> Tensor:
    """Compute the cross-entropy with a stored teacher without building its [B, K] distribution.

    At temperature 1: higher than the KL form by the teacher's entropy, with the same gradient.

    Source: Wu et al. 2022 (TinyViT), arXiv:2207.10666, section 3.2.
    """
    student_log_probs = torch.log_softmax(upcast(student_logits), dim=-1)
    dtype = student_log_probs.dtype
    probs = as_constant(teacher.log_probs).to(dtype).exp()
    picked = student_log_probs.gather(-1, teacher.indices.long())
    rest = student_log_probs.shape[-1] - probs.shape[-1]
    per_example = -(probs * picked).sum(dim=-1)
    if rest:
        even = as_constant(teacher.residual).to(dtype) / rest
        per_example = per_example - even * (student_log_probs.sum(dim=-1) - picked.sum(dim=-1))
    return mean_valid(per_example, mask)


class TinyViTSparse(Loss):
    """`compute_sparse_cross_entropy` with the step's stored teacher; targets are not used."""

    def compute(self, inputs: LossInputs) -> Tensor:
        if inputs.sparse_teacher is None:
            raise UserError(
                "distill.losses: tinyvit_sparse needs stored teacher answers; set "
                "distill.teacher_cache, or use kd with form: cross_entropy and a live teacher"
            )
        return compute_sparse_cross_entropy(
            inputs.student_logits, inputs.sparse_teacher, mask=inputs.mask
        )
