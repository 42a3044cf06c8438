"""Several teachers: means of losses, probabilities or logits, and big_vision's sum."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from losses.base import LossInputs, check_classes
from losses.logits.standardise import Wrapper
from losses.reductions import as_constant, sum_terms
from utils.errors import UserError
from utils.json_types import JsonMapping


def average_probs(
    teacher_logits: Sequence[Tensor], temperature: float, *, shares: Sequence[float]
) -> Tensor:
    """Return [B, K] logits whose softmax at T is the weighted mean of the teachers' softmax at T.

    `temperature` is that of the student's loss; `shares` has one factor per teacher, sum 1.
    """
    logs = [
        torch.log_softmax(as_constant(logits) / temperature, dim=-1) + math.log(share)
        for share, logits in zip(shares, teacher_logits, strict=True)
    ]
    return temperature * torch.logsumexp(torch.stack(logs), dim=0)


def average_logits(teacher_logits: Sequence[Tensor], *, shares: Sequence[float]) -> Tensor:
    """Return [B, K] weighted means of logits: the normalised geometric mean of probabilities."""
    return sum_terms(
        share * as_constant(logits) for share, logits in zip(shares, teacher_logits, strict=True)
    )


def combine_answers(
    answers: Sequence[Tensor], weights: Sequence[float], ensemble: str
) -> tuple[Tensor, ...]:
    """Combine the logits of several teachers for the losses.

    Args:
      answers: logits [B, K] of each teacher.
      weights: one factor per teacher, scaled to sum 1.
      ensemble: `probs`: log of the weighted mean of probabilities at temperature 1; `logits`:
        weighted mean of logits; `separate`: all logits, unchanged.
    """
    if len(answers) < 2 or ensemble == "separate":
        return tuple(answers)
    # In float32, the dtype of the logits, in which these logarithms were always computed.
    shares = array("f", [weight / sum(weights) for weight in weights])
    if ensemble == "logits":
        return (average_logits(answers, shares=shares),)
    return (average_probs(answers, 1.0, shares=shares),)


class Ensemble(Wrapper):
    """`loss` against several teachers.

    `weights`: one number above 0 per teacher, scaled to sum 1; equal by default. `averages_probs`:
    True if teachers are averaged as distributions, which plain numbers are not.
    """

    averages_probs: bool = False

    def __init__(
        self,
        loss: str = "kd",
        loss_args: JsonMapping | None = None,
        weights: Sequence[float] | None = None,
        temperature: float | None = None,
        group_size: int | None = None,
    ) -> None:
        if weights is not None and (not weights or min(weights) <= 0):
            raise UserError(
                f"distill.losses: weights of teachers are {list(weights)}; give one number "
                "above 0 per teacher, or none for equal weights"
            )
        super().__init__(loss, loss_args, temperature, group_size)
        self.weights = weights
        self.takes_numbers = self.inner.takes_numbers and not self.averages_probs

    def get_shares(self, inputs: LossInputs) -> list[float]:
        """Return one share per teacher, sum 1."""
        count = len(inputs.teacher_logits)
        if count == 0:
            raise UserError("distill.losses: multi_* losses need live teachers and got none")
        for logits in inputs.teacher_logits:
            check_classes(inputs.student_logits, logits)
        weights = self.weights or [1.0] * count
        if len(weights) != count:
            raise UserError(
                f"distill.losses: {len(weights)} weights for {count} teachers; give one each"
            )
        return [weight / sum(weights) for weight in weights]

    def compute_each(self, inputs: LossInputs) -> list[Tensor]:
        """Compute the inner loss against each teacher alone."""
        return [
            self.inner.compute(replace(inputs, teacher_logits=(logits,)))
            for logits in inputs.teacher_logits
        ]


class MeanOfLosses(Ensemble):
    """Weighted mean of the losses against each teacher.

    For kd the gradient is that of `multi_avg_prob` and the value higher by T^2 times the
    Jensen-Shannon divergence of the teachers. The inner loss runs once per teacher.
    """

    def compute(self, inputs: LossInputs) -> Tensor:
        pairs = zip(self.get_shares(inputs), self.compute_each(inputs), strict=True)
        return sum_terms(share * value for share, value in pairs)


class MeanOfProbs(Ensemble):
    """The loss against the weighted mean of the teachers' probabilities at its temperature or 1."""

    averages_probs = True

    def compute(self, inputs: LossInputs) -> Tensor:
        temperature = getattr(self.inner, "temperature", 1.0)
        shares = self.get_shares(inputs)
        mean = average_probs(inputs.teacher_logits, temperature, shares=shares)
        return self.inner.compute(replace(inputs, teacher_logits=(mean,)))


class MeanOfLogits(Ensemble):
    """The loss against the weighted mean of the teachers' logits, before any temperature."""

    def compute(self, inputs: LossInputs) -> Tensor:
        mean = average_logits(inputs.teacher_logits, shares=self.get_shares(inputs))
        return self.inner.compute(replace(inputs, teacher_logits=(mean,)))


class SumOfLosses(Ensemble):
    """Sum of the losses against each teacher; with weights, N times their weighted mean."""

    def compute(self, inputs: LossInputs) -> Tensor:
        shares = self.get_shares(inputs)
        pairs = zip(shares, self.compute_each(inputs), strict=True)
        return sum_terms(len(shares) * share * value for share, value in pairs)


def create_sum_of_distances(temperature: float = 1.0) -> SumOfLosses:
    """Create `multi_sum` of `bv_kl`: big_vision adds the distances of several teachers."""
    return SumOfLosses("bv_kl", {"temperature": temperature})
