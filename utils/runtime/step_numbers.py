"""`StepNumbers`: what the host tells a training step, which is a function of tensors."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class StepNumbers(NamedTuple):
    """Numbers of a step that the host knows, uploaded before it begins.

    Attributes:
      rates: the optimizer's learning rates, if it takes them from the device.
      average_weights: weight of each average of the student's weights, if there are averages.
      step: number of the step, float32 [1].
      first_bad_step: number of the first step that was not finite, or -1, float32 scalar.
    """

    rates: Tensor | None = None
    average_weights: Tensor | None = None
    step: Tensor | None = None
    first_bad_step: Tensor | None = None
