"""timm's Muon family on XLA: plain products, and matrices as files show them.

timm 1.0.31 orthogonalises with `addmm(..., out=)`, whose factors have no lowering: 30 reads of the
host in a step of five matrices. And it takes the first axis of a weight for its outputs, which a
convolution that lies as HWIO (models/patches/convolution.py) has last.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from utils.runtime.axes import view_as_in_files

if TYPE_CHECKING:
    from types import ModuleType

Coefficients = Sequence[tuple[float, float, float]]
_EPS = 1e-7  # as in timm


@contextlib.contextmanager
def lower_muon(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """While a Muon steps, its module computes in what lowers; nothing for other optimizers."""
    from timm.optim import muon

    if not isinstance(optimizer, muon.Muon):
        yield
        return
    changed = _get_replacements(muon)
    saved = {name: getattr(muon, name) for name in changed}
    try:
        vars(muon).update(changed)  # what the optimizer's own code calls
        yield
    finally:
        vars(muon).update(saved)


def orthogonalise(
    matrices: Tensor,
    steps: int,
    coefficients: Coefficients,
    eps: float = _EPS,
    safety_factor: float = 1.0,
    scale_eps: bool = False,
) -> Tensor:
    """[..., M, N] -> the nearest matrices with singular values of about 1, by Newton-Schulz.

    It is computed in bfloat16, as by timm; float64 matrices stay what they are.

    Args:
      coefficients: of the quintic of each step; the last ones go on where there are more steps.

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
    return {
        "zeropower_via_newtonschulz": orthogonalise,
        "muon": partial(_call_as_in_files, muon.muon),
        "adamuon": partial(_call_as_in_files, muon.adamuon),
        "_is_suitable_for_muon": lambda parameter, **rest: suits(
            view_as_in_files(parameter, parameter.detach()), **rest
        ),
    }


def _call_as_in_files(
    function: Callable[..., None],
    parameters: list[Tensor],
    *lists: list[Tensor],
    **arguments: object,
) -> None:
    """A step whose parameters, gradients and moments have the axes of files; it works in place."""
    seen = [
        [_view(parameter, one) for parameter, one in zip(parameters, tensors, strict=True)]
        for tensors in (parameters, *lists)
    ]
    function(*seen, **arguments)


def _view(parameter: Tensor, tensor: Tensor) -> Tensor:
    return view_as_in_files(parameter, tensor) if tensor.shape == parameter.shape else tensor
