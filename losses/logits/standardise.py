"""Losses on logits at a scale of their own: standardised logits, NormKD, CTKD's temperature."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from losses.base import LogitLoss, Loss, LossInputs, get_teacher_logits
from losses.factory import check_positive, create_loss, define
from losses.logits.kd import kl_per_example
from losses.reductions import Mask, as_constant, mean_valid, safe_sqrt, soften, upcast
from utils.json_types import JsonMapping

# Bounds of the learnt temperature, COLDEST + WIDTH * sigmoid(parameter): the paper's 1 to 21.
COLDEST, WIDTH = 1.0, 20.0
EPS = 1e-12  # keeps rows of equal logits finite


def standardise_logits(logits: Tensor, eps: float = 1e-7) -> Tensor:
    """Compute (x - mean) / (std + eps) over the classes of each row.

    Args:
      logits: [..., K], K >= 2; the gradient flows through mean and std.
      eps: added to the standard deviation, which has Bessel's correction (divisor K - 1). The
        biased one would scale by sqrt(K / (K - 1)): 5 % at K = 10, 0.05 % at K = 1000.

    Source: Sun et al. 2024, arXiv:2403.01427, section 4.
    """
    values = upcast(logits)
    centred = values - values.mean(dim=-1, keepdim=True)
    variance = centred.square().sum(dim=-1, keepdim=True) / (values.shape[-1] - 1)
    return centred / (safe_sqrt(variance) + eps)


class Wrapper(Loss):
    """A loss that passes other logits than the step's to the logit loss `loss` (`loss_args`)."""

    def __init__(
        self,
        loss: str = "kd",
        loss_args: JsonMapping | None = None,
        temperature: float | None = None,
        group_size: int | None = None,
    ) -> None:
        super().__init__()
        self.inner = create_loss(loss, loss_args, temperature=temperature, group_size=group_size)
        self.why_not_tokens = self.inner.why_not_tokens

    def needs_distill_token(self) -> bool:
        return self.inner.needs_distill_token()


class LogitStandardisation(Wrapper):
    """`loss` on standardised logits of student and of one teacher, live or stored.

    T of the inner loss divides after standardisation, and its T^2 stays; torchdistill drops it.
    """

    def __init__(
        self,
        loss: str = "kd",
        loss_args: JsonMapping | None = None,
        eps: float = 1e-7,
        temperature: float | None = None,
        group_size: int | None = None,
    ) -> None:
        check_positive("lskd", eps=eps)
        super().__init__(loss, loss_args, temperature, group_size)
        self.eps = eps

    def compute(self, inputs: LossInputs) -> Tensor:
        teacher = as_constant(get_teacher_logits(inputs))
        distill = inputs.student_distill_logits
        standardised = replace(
            inputs,
            student_logits=standardise_logits(inputs.student_logits, self.eps),
            teacher_logits=(standardise_logits(teacher, self.eps),),
            student_distill_logits=None
            if distill is None
            else standardise_logits(distill, self.eps),
        )
        return self.inner.compute(standardised)


def create_standardised_kd(temperature: float = 2.0, eps: float = 1e-7) -> LogitStandardisation:
    return LogitStandardisation("kd", {"temperature": temperature}, eps)


def create_standardised_dkd(
    temperature: float = 4.0, alpha: float = 1.0, beta: float = 8.0, eps: float = 1e-7
) -> LogitStandardisation:
    args = {"temperature": temperature, "alpha": alpha, "beta": beta}
    return LogitStandardisation("dkd", args, eps)


def compute_norm_kd(
    student_logits: Tensor, teacher_logits: Tensor, *, scale: float, mask: Mask = None
) -> Tensor:
    """Compute KL with T = `scale` * the logits' standard deviation, for each example and side.

    The student's gradient flows through its deviation as well. Each example counts times the square
    of its teacher's temperature; `lskd` is the same without that factor. `scale`: > 0; the
    deviation has Bessel's correction (divisor K - 1).

    Source: Chi et al. 2023 (NormKD), arXiv:2308.00520, section 3.
    """
    teacher = as_constant(teacher_logits)
    log_probs = torch.log_softmax(standardise_logits(teacher, EPS) / scale, dim=-1)
    student = standardise_logits(student_logits, EPS) / scale
    divergence = kl_per_example(log_probs, torch.log_softmax(student, dim=-1))
    centred = teacher - teacher.mean(dim=-1, keepdim=True)
    variance = centred.square().sum(dim=-1) / (teacher.shape[-1] - 1)
    return mean_valid((scale * safe_sqrt(variance)).square() * divergence, mask)


class CurriculumTemperature(Loss):
    """`kd` at one learnt temperature that is trained against the student, harder as it goes.

    The gradient that reaches the temperature is reversed and multiplied by
    (1 - cos(pi * min(calls / curriculum_steps, 1))) / 2; the value does not depend on it. `calls`
    counts the loss's own forwards (micro-batches), a buffer like the memories of `crd`. The
    temperature starts at 1 + 20 sigmoid(1) = 15.6 and stays between 1 and 21; weight decay of
    one-dimensional parameters does not touch it.

    Source: Li et al. 2023 (CTKD, global temperature), arXiv:2211.16231, equations 5 to 9.
    """

    why_not_tokens = "trains a temperature of its own, once a step"

    def __init__(self, curriculum_steps: int) -> None:
        super().__init__()
        check_positive("ctkd", curriculum_steps=curriculum_steps)
        self.curriculum_steps = curriculum_steps
        self.raw_temperature = nn.Parameter(torch.ones(1))
        self.register_buffer("calls", torch.zeros(1))

    def get_temperature(self) -> Tensor:
        """Return [1] T, its gradient reversed."""
        progress = (self.calls / self.curriculum_steps).clamp(max=1.0)
        pressure = (1 - (math.pi * progress).cos()) / 2
        raw = self.raw_temperature
        reversed_raw = raw.detach() - pressure * (raw - raw.detach())
        return COLDEST + WIDTH * torch.sigmoid(reversed_raw)

    def compute(self, inputs: LossInputs) -> Tensor:
        teacher = as_constant(get_teacher_logits(inputs))
        student = upcast(inputs.student_logits)
        temperature = self.get_temperature().to(student.dtype)
        logs = soften(student, teacher, temperature)
        value = mean_valid(kl_per_example(*logs), inputs.mask)
        if torch.is_grad_enabled():
            self.calls.add_(1.0)
        return (temperature**2 * value).squeeze()


create_norm_kd = define(LogitLoss, "normkd", compute_norm_kd, "scale", scale=2.0)
