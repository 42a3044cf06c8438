"""The inverse A of I + L, with L strictly lower triangular [..., C, C], in three ways.

`triangular_solve` is one operation that XLA lowers natively (`torch.linalg.solve_triangular` falls
back to the host there). `ladder16` inverts blocks of 16 and doubles them: products of matrices
only, and no power of L, which would overflow where entries exceed 1. `rows` substitutes row by row.

None is differentiated: of A = (I + L)^-1 the gradient is -A^T dA A^T, which callers use as they
hold A already.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from models.delta.decay import SUB_BLOCK, cut_diagonal, join_blocks
from utils.errors import UserError


def invert(lower: Tensor, solver: str) -> Tensor:
    """(I + L)^-1 by one of `SOLVERS`.

    Raises:
      UserError: there is no such solver.
    """
    if solver not in SOLVERS:
        raise UserError(f"solver ({solver!r}) is none of {', '.join(SOLVERS)}; choose one")
    return SOLVERS[solver](lower)


def _solve(lower: Tensor) -> Tensor:
    one = _create_identity(lower).expand_as(lower)
    if torch.compiler.is_compiling():
        # Of torch.compile, which XLA does not use; it would break a graph at the filter below.
        return torch.linalg.solve_triangular(lower, one, upper=False, unitriangular=True)
    with warnings.catch_warnings():
        # Deprecated in favour of the one that XLA cannot lower.
        warnings.simplefilter("ignore", UserWarning)
        return torch.triangular_solve(one, lower, upper=False, unitriangular=True).solution


def _substitute(lower: Tensor) -> Tensor:
    one = _create_identity(lower).expand_as(lower)
    rows = [one[..., :1, :]]
    for place in range(1, lower.shape[-1]):
        known = torch.cat(rows, dim=-2)
        row = lower[..., place : place + 1, :place]
        rows.append(one[..., place : place + 1, :] - row @ known)
    return torch.cat(rows, dim=-2)


def _climb(lower: Tensor) -> Tensor:
    count, size = lower.shape[-1], 1
    first = min(SUB_BLOCK, count)
    blocks = cut_diagonal(lower, first)
    inverse = _create_identity(blocks).expand_as(blocks)
    while size < first:
        # X - X L_s X with the part of L that stands below pairs of blocks of size s.
        step = torch.where(_mark_lower_halves(first, size, lower.device), blocks, 0.0)
        inverse = inverse - inverse @ step @ inverse
        size *= 2
    while size < count:
        below = cut_diagonal(lower, 2 * size)[..., size:, :size]
        first_half, second_half = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        inverse = join_blocks(inverse, -(second_half @ below @ first_half))
        size *= 2
    return inverse.squeeze(-3)


def _mark_lower_halves(count: int, size: int, device: torch.device) -> Tensor:
    """Bool [C, C]: lower left quarters of the blocks of 2 s on the diagonal."""
    place = torch.arange(count, device=device)
    block, half = place // (2 * size), place // size
    same = block.unsqueeze(-1) == block
    return same & (half.unsqueeze(-1) > half)


def _create_identity(x: Tensor) -> Tensor:
    return torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)


SOLVERS: dict[str, Callable[[Tensor], Tensor]] = {
    "triangular_solve": _solve,
    "ladder16": _climb,
    "rows": _substitute,
}
