"""Losses of a regression, in units of the targets' spread."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from losses.base import LogitLoss, LossInputs
from losses.factory import define
from losses.reductions import Mask, as_constant, mean_valid, upcast
from utils.errors import UserError, get_hint

# A variance below it is a division by zero, not an estimate: 0.7 % of the spread, squared.
MIN_LOG_VARIANCE = -10.0


def compute_squared_error(predictions: Tensor, targets: Tensor, *, mask: Mask = None) -> Tensor:
    """Compute the squared error: mean over targets [B, O], then over valid examples; no 1/2."""
    errors = upcast(predictions) - as_constant(targets)
    return mean_valid(errors.square().mean(dim=1), mask)


def compute_absolute_error(predictions: Tensor, targets: Tensor, *, mask: Mask = None) -> Tensor:
    """Compute the absolute error, reduced like `compute_squared_error`."""
    errors = upcast(predictions) - as_constant(targets)
    return mean_valid(errors.abs().mean(dim=1), mask)


def compute_huber(
    predictions: Tensor, targets: Tensor, *, mask: Mask = None, delta: float = 1.0
) -> Tensor:
    """Compute error^2 / 2 up to `delta`, then delta * (error - delta / 2); reduced likewise.

    Source: Huber 1964, Annals of Mathematical Statistics 35(1), section 3.
    """
    sizes = (upcast(predictions) - as_constant(targets)).abs()
    inner = sizes.clamp(max=delta)
    return mean_valid((inner * (sizes - 0.5 * inner)).mean(dim=1), mask)


def compute_gaussian_nll(predictions: Tensor, log_variances: Tensor, targets: Tensor) -> Tensor:
    """Compute [B, O] -log N(target; prediction, variance) in nats.

    Logarithms of variances [B, O] are at least MIN_LOG_VARIANCE, below it without gradient.

    Source: Nix and Weigend 1994, ICNN, equation 2, with the constant.
    """
    errors = upcast(predictions) - as_constant(targets)
    logs = upcast(log_variances).clamp(min=MIN_LOG_VARIANCE)
    return 0.5 * (logs + errors.square() * (-logs).exp() + math.log(2 * math.pi))


# The losses on predictions alone; the fourth also takes the variances.
_PLAIN: dict[str, Callable[..., Tensor]] = {
    "mse": compute_squared_error,
    "mae": compute_absolute_error,
    "huber": compute_huber,
}
GAUSSIAN = "gaussian_nll"
REGRESSION_LOSSES = (*_PLAIN, GAUSSIAN)


def get_regression_loss(name: str) -> Callable[[LossInputs], Tensor]:
    """Return the loss that train.task_loss names, mse by default; a UserError if it is unknown."""
    name = name or "mse"
    if name not in REGRESSION_LOSSES:
        raise UserError(
            f"unknown train.task_loss {name!r} for train.task=regress; "
            f"{get_hint(name, REGRESSION_LOSSES)}"
        )
    if name == GAUSSIAN:
        return _compute_nll_of
    return lambda inputs: _PLAIN[name](inputs.student_logits, inputs.targets, mask=inputs.mask)


# Terms between the student's and a teacher's predictions, in units of the spread.
create_prediction_mse = define(
    LogitLoss, "prediction_mse", compute_squared_error, takes_numbers=True
)
create_prediction_mae = define(
    LogitLoss, "prediction_mae", compute_absolute_error, takes_numbers=True
)
create_prediction_huber = define(
    LogitLoss, "prediction_huber", compute_huber, "delta", delta=1.0, takes_numbers=True
)


def _compute_nll_of(inputs: LossInputs) -> Tensor:
    assert inputs.log_variances is not None, "the model was made without variances"
    assert inputs.targets is not None
    each = compute_gaussian_nll(inputs.student_logits, inputs.log_variances, inputs.targets)
    return mean_valid(each.mean(dim=1), inputs.mask)
