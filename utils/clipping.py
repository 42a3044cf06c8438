"""Clips gradients by their norm, by value, or relative to their weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from utils.runtime.axes import view_as_in_files
from utils.runtime.processes.shards import join

# Lower bound of the norm of a unit's weights: weights of zero must move, too.
MIN_UNIT_NORM = 1e-3


@dataclass(frozen=True)
class Clipping:
    """At most one limit of gradients."""

    norm: float | None = None  # of all gradients together
    value: float | None = None  # of each number
    ratio: float | None = None  # of a unit's gradient to the unit's weights


@torch.no_grad()
def clip_gradients(
    parameters: Sequence[nn.Parameter], clipping: Clipping, head: Iterable[nn.Parameter] = ()
) -> Tensor:
    """Clip gradients in place, for a `ratio` except those of `head`; return the norm before."""
    # Not foreach: it reads the device.
    if clipping.norm is not None:
        return join(clip_grad_norm_(parameters, clipping.norm, foreach=False))
    with_grad = [parameter for parameter in parameters if parameter.grad is not None]
    norm = get_total_norm([p.grad for p in with_grad if p.grad is not None], foreach=False)
    kept = {id(parameter) for parameter in head}
    for parameter in with_grad:
        gradient = parameter.grad
        assert gradient is not None
        if clipping.value is not None:
            gradient.clamp_(-clipping.value, clipping.value)
        elif clipping.ratio is not None and id(parameter) not in kept:
            view, weights = (view_as_in_files(parameter, t) for t in (gradient, parameter))
            view.copy_(clip_to_weights(view, weights, clipping.ratio))
    return join(norm)


def clip_to_weights(gradient: Tensor, weights: Tensor, ratio: float) -> Tensor:
    """Clip each unit of a gradient to `ratio` times the norm of the unit's weights.

    A unit is the weights of one output: all but the first axis; a vector is one unit.

    Source: Brock et al. 2021, arXiv:2102.06171, section 4.
    """
    limit = _get_unit_norms(weights).clamp(min=MIN_UNIT_NORM) * ratio
    norms = _get_unit_norms(gradient)
    return torch.where(norms < limit, gradient, gradient * (limit / norms.clamp(min=1e-6)))


def _get_unit_norms(values: Tensor) -> Tensor:
    if values.ndim <= 1:
        return torch.linalg.vector_norm(values)
    return torch.linalg.vector_norm(values, dim=tuple(range(1, values.ndim)), keepdim=True)
