"""Schedules of the weights of loss terms: data of each step, never constants of a graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from utils.config.distill import DistillSection, LossTerm


class TermWeights:
    """Factors on the terms at a step: nothing, then a linear rise, then a cosine to the end."""

    def __init__(self, terms: Sequence[LossTerm], total_steps: int, steps_per_epoch: int) -> None:
        self._terms = tuple(terms)
        self._total_steps = total_steps
        self._steps_per_epoch = steps_per_epoch

    @classmethod
    def create(
        cls, terms: Sequence[LossTerm], total_steps: int, steps_per_epoch: int
    ) -> TermWeights | None:
        """The schedules of a run; none if every weight is constant."""
        moves = any(
            term.weight_end is not None or term.warmup_epochs or term.start_epoch for term in terms
        )
        return cls(terms, total_steps, steps_per_epoch) if moves else None

    def get_scales(self, step: int) -> Tensor:
        """Float32 [terms]: what each term's `weight` is multiplied by at a step."""
        return torch.tensor([self._get_scale(term, step) for term in self._terms])

    def _get_scale(self, term: LossTerm, step: int) -> float:
        start = round(term.start_epoch * self._steps_per_epoch)
        if step < start:
            return 0.0
        step, total_steps = step - start, self._total_steps - start
        rise = round(term.warmup_epochs * self._steps_per_epoch)
        if step < rise:
            return step / rise
        if term.weight_end is None or term.weight == 0:
            return 1.0
        progress = min((step - rise) / max(total_steps - 1 - rise, 1), 1.0)
        end = term.weight_end / term.weight
        return end + 0.5 * (1.0 - end) * (1.0 + math.cos(math.pi * progress))


class AlphaSchedule:
    """The share of distillation at a step, which grows with the epochs and is 0 in the first one.

    There the student as it was an epoch ago is the one that nobody has trained.

    Source: Kim et al. 2021 (PS-KD), arXiv:2006.12000, section 3.2.
    """

    def __init__(self, distill: DistillSection, total_steps: int, steps_per_epoch: int) -> None:
        self._alpha, self._steps_per_epoch = distill.alpha, steps_per_epoch
        self._epochs = -(-total_steps // steps_per_epoch)

    def get_alpha(self, step: int) -> Tensor:
        """Float32 scalar."""
        epoch = step // self._steps_per_epoch
        share = (epoch + 1) / self._epochs if epoch else 0.0
        return torch.tensor(self._alpha * share)
