"""Optimizers on XLA: hyperparameters as data of one graph, and a Muon of plain products.

Some optimizers of timm decay weights by 1 - lr * weight_decay, a Python float: if the product is
below 2^-24, it is exactly 1 in float32, a constant for which XLA compiles another graph.

timm 1.0.31 orthogonalises Muon's matrices with `addmm(..., out=)`, whose factors have no lowering:
30 host reads in a step of five matrices. It also takes the first axis of a weight for its outputs,
which is the last one of a convolution stored as HWIO (models/patches/convolution.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from utils.log import get_logger
from utils.runtime.axes import view_as_in_files
from utils.runtime.updates import Updates

# Classes of timm's optimizers with such a decay.
FACTOR_DECAYS = ("AdaBelief", "AdafactorBigVision", "Adan", "Lion", "SGDW")
# The least product of rate and decay whose factor is not 1: a unit in the last place of a weight.
LEAST_PRODUCT = 6.0e-8
_MUONS = ("muon", "nmuon", "adamuon", "nadamuon")
# Optimizers that support a learning rate on the device: any value, 0 and 1 included, is then data
# of one graph. The others take Python floats.
_DEVICE_LR = (
    *("adamw", "adam", "nadam", "adamax", "nadamw", "cadamw", "cnadamw", "adamc", "nadamc"),
    *_MUONS,
)


class GraphUpdates(Updates):
    """Updates whose hyperparameters are data of the graph, never constants."""

    _has_raised = False

    def get_arguments(self, optimizer_name: str) -> dict[str, bool]:
        if optimizer_name not in _DEVICE_LR:
            return {}
        return {"capturable": True} | ({} if optimizer_name in _MUONS else {"foreach": False})

    def _step(self, optimizer: Optimizer) -> None:
        with lower_muon(optimizer):
            super()._step(optimizer)

    def set_hyperparameters(
        self, optimizer: Optimizer, lrs: Sequence[float], decays: Sequence[float]
    ) -> Tensor | None:
        raised = raise_decays(optimizer, lrs, decays)
        if raised != list(decays) and not self._has_raised:
            self._has_raised = True
            rows = zip(lrs, decays, raised, strict=True)
            lr, configured, decay = next(row for row in rows if row[1] != row[2])
            get_logger().warning(
                "optim.weight_decay: %s's %g is raised to %.3g where the learning rate is %.3g, so "
                "that a step still takes %g of a weight: less is nothing in float32, and XLA would "
                "compile another graph; learning rates stay as they are",
                *(type(optimizer).__name__, configured, decay, lr, LEAST_PRODUCT),
            )
        super().set_hyperparameters(optimizer, lrs, raised)
        if not self._takes_rates(optimizer):
            return None
        return self._hold_rates(optimizer, self._device.upload(self._list(optimizer, lrs, raised)))

    def _takes_rates(self, optimizer: Optimizer) -> bool:
        return bool(optimizer.defaults.get("capturable"))

    def _list(
        self, optimizer: Optimizer, lrs: Sequence[float], decays: Sequence[float]
    ) -> Sequence[float]:
        """List the numbers that the optimizer takes from the device: rates, then what follows."""
        return lrs

    def _hold_rates(self, optimizer: Optimizer, rates: Tensor) -> Tensor | None:
        """Give the optimizer its rates now, as recorded work; None is left for `apply`."""
        self.place_rates(optimizer, rates)
        return None

    def place_rates(self, optimizer: Optimizer, rates: Tensor | None) -> None:
        # A zero-dimensional host tensor of 0 or 1 would be baked into the graph; a slice of an
        # uploaded vector is always data.
        if rates is not None:
            for position, group in enumerate(optimizer.param_groups):
                group["lr"] = rates[position]


def raise_decays(
    optimizer: Optimizer, lrs: Sequence[float], decays: Sequence[float]
) -> list[float]:
    """Raise weight decays whose effect on a weight would be less than a rounding.

    Learning rates do not change, nor do groups without decay and other optimizers. `lrs` and
    `decays` are those of a step, in group order.
    """
    if type(optimizer).__name__ not in FACTOR_DECAYS:
        return list(decays)
    rows = zip(optimizer.param_groups, lrs, decays, strict=True)
    return [
        max(decay, LEAST_PRODUCT / _get_factor(group, lr)) if group.get("decays", decay) else decay
        for group, lr, decay in rows
    ]


def _get_factor(group: dict[str, Any], lr: float) -> float:
    """Return the factor by which an optimizer multiplies a group's decay."""
    is_apart = group.get("unscaled_wd") or group.get("fixed_decay")
    if group.get("corrected_weight_decay"):
        share = lr / float(group["max_lr_snapshot"])
        return share if is_apart else lr * share
    return 1.0 if is_apart else lr


@contextlib.contextmanager
def lower_muon(optimizer: Optimizer) -> Iterator[None]:
    """Replace operations of Muon that have no lowering, for the duration of a step."""
    from timm.optim import muon

    if not isinstance(optimizer, muon.Muon):
        yield
        return
    changed = _get_replacements(muon)
    saved = {name: getattr(muon, name) for name in changed}
    try:
        vars(muon).update(changed)  # names that the optimizer's own code calls
        yield
    finally:
        vars(muon).update(saved)


def orthogonalise(
    matrices: Tensor,
    steps: int,
    coefficients: Sequence[tuple[float, float, float]],
    eps: float = 1e-7,
    safety_factor: float = 1.0,
    scale_eps: bool = False,
) -> Tensor:
    """[..., M, N] -> the nearest matrices with singular values of about 1, by Newton-Schulz.

    Computed in bfloat16, as in timm; float64 matrices stay float64. `coefficients` are of the
    quintic of each step; the last ones serve all further steps.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon.
    """
    rows, columns = matrices.shape[-2:]
    eps = eps * (columns / rows) ** 0.5 if scale_eps else eps
    dtype = matrices.dtype if matrices.dtype == torch.float64 else torch.bfloat16
    # Rounded where timm's fused products round, so that the values are timm's.
    wide = torch.promote_types(dtype, torch.float32)
    x = matrices.to(dtype).to(wide)
    x = x.transpose(-2, -1) if rows > columns else x
    norm = x.square().sum(dim=(-2, -1), keepdim=True).sqrt().to(dtype) * safety_factor
    norm = norm + eps if scale_eps else norm.clamp(min=eps)
    x = (x.to(dtype) / norm).to(wide)
    for number in range(steps):
        a, b, c = coefficients[min(number, len(coefficients) - 1)]
        square = (x @ x.transpose(-2, -1)).to(dtype).to(wide)
        mixed = (b * square + c * (square @ square)).to(dtype).to(wide)
        x = (a * x + mixed @ x).to(dtype).to(wide)
    x = x.to(dtype)
    return x.transpose(-2, -1) if rows > columns else x


def _get_replacements(muon: ModuleType) -> dict[str, Callable[..., object]]:
    suits = muon._is_suitable_for_muon

    def is_suitable(parameter: Tensor, **rest: object) -> bool:
        return suits(view_as_in_files(parameter, parameter.detach()), **rest)

    return {
        "zeropower_via_newtonschulz": orthogonalise,
        "muon": partial(_call_as_in_files, muon.muon),
        "adamuon": partial(_call_as_in_files, muon.adamuon),
        "_is_suitable_for_muon": is_suitable,
    }


def _call_as_in_files(
    function: Callable[..., None],
    parameters: list[Tensor],
    *lists: list[Tensor],
    **arguments: object,
) -> None:
    """Call an in-place step on views of parameters, gradients and moments with files' axes."""
    views = [
        [
            view_as_in_files(parameter, tensor) if tensor.shape == parameter.shape else tensor
            for parameter, tensor in zip(parameters, tensors, strict=True)
        ]
        for tensors in (parameters, *lists)
    ]
    function(*views, **arguments)
