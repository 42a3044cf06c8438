"""Losses that choose the temperature: from the logits' spread, or trained against the student."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from losses.base import LogitLoss, Loss, LossInputs, get_teacher_logits
from losses.factory import check_positive, define
from losses.logits.kd import kl_per_example
from losses.logits.standardise import standardise_logits
from losses.reductions import Mask, as_constant, mean_valid, safe_sqrt, soften, upcast

# Bounds of the learnt temperature, COLDEST + WIDTH * sigmoid(parameter): the paper's 1 to 21.
COLDEST, WIDTH = 1.0, 20.0
EPS = 1e-12  # keeps rows of equal logits finite


def compute_norm_kd(
    student_logits: Tensor, teacher_logits: Tensor, *, scale: float, mask: Mask = None
) -> Tensor:
    """Compute KL with T = `scale` * the logits' standard deviation, for each example and side.

    The student's gradient flows through its deviation as well. Each example counts times the
    square of its teacher's temperature; `lskd` is the same without that factor.

    Args:
      scale: > 0; the deviation has Bessel's correction (divisor K - 1).

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
