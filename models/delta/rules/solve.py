"""The inverse A of I + L, with L strictly lower triangular [..., C, C], in three ways.

`triangular_solve` is one operation that XLA lowers natively (`torch.linalg.solve_triangular` falls
back to the host there). `ladder16` inverts blocks of 16 and doubles them: products of matrices
only, and no power of L, which would overflow where entries exceed 1. `rows` substitutes row by row.

None is differentiated: the gradient of A = (I + L)^-1 is -A^T dA A^T, and callers hold A already.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from models.delta.rules.decay import SUB_BLOCK, cut_diagonal, join_blocks
from utils.errors import UserError


def invert(lower: Tensor, solver: str) -> Tensor:
    """Return (I + L)^-1 by one of `SOLVERS`; a UserError for an unknown one."""
    if solver not in SOLVERS:
        raise UserError(f"solver ({solver!r}) is unknown; use one of {', '.join(SOLVERS)}")
    return SOLVERS[solver](lower)


def invert_beside(lower: Tensor, solver: str) -> Tensor:
    """Return the same of systems [N, B, H, C, C], with those of an example as one dimension.

    A TPU computes as many at once as their last dimension holds, one in each lane.
    """
    inverse = invert(lower.transpose(0, 1).flatten(1, 2), solver)
    return inverse.unflatten(1, (lower.shape[0], -1)).transpose(0, 1)


def _solve(lower: Tensor) -> Tensor:
    identity = _create_identity(lower).expand_as(lower)
    if torch.compiler.is_compiling():
        # XLA does not use torch.compile, whose graph would break at the filter below.
        return torch.linalg.solve_triangular(lower, identity, upper=False, unitriangular=True)
    with warnings.catch_warnings():
        # Deprecated in favour of the operator that XLA cannot lower.
        warnings.simplefilter("ignore", UserWarning)
        return torch.triangular_solve(identity, lower, upper=False, unitriangular=True).solution


def _substitute(lower: Tensor) -> Tensor:
    """Invert elementwise, all systems side by side: no product that is rounded to bfloat16.

    Blocks of 16 row by row, then doubled.
    """
    shape, count = lower.shape, lower.shape[-1]
    lower = lower[(None,) * (5 - lower.dim())]
    outer = lower.shape[0], lower.shape[2]
    # [C, C, B, N H] of [N, B, H, C, C]: systems are the last dimension, one in each lane.
    systems = lower.movedim((-2, -1), (0, 1)).movedim(2, 3).flatten(3)
    size = min(SUB_BLOCK, count)
    inverse = _substitute_rows(_cut_beside(systems, size, 0))
    while size < count:
        below = _cut_beside(systems, 2 * size, size)
        first, second = inverse[0::2], inverse[1::2]
        lower_left = -_multiply_beside(second, _multiply_beside(below, first))
        upper = torch.cat([first, torch.zeros_like(first)], dim=2)
        inverse = torch.cat([upper, torch.cat([lower_left, second], dim=2)], dim=1)
        size *= 2
    whole = inverse.squeeze(0).unflatten(3, outer)
    return whole.movedim(3, 2).movedim((0, 1), (-2, -1)).reshape(shape)


def _cut_beside(systems: Tensor, size: int, down: int) -> Tensor:
    """Blocks [C / size, s, s, ...] of [C, C, ...] on the diagonal; with `down` = s below it."""
    width = size - down
    rows = range(0, systems.shape[0], size)
    return torch.stack([systems[x + down : x + size, x : x + width] for x in rows])


def _substitute_rows(blocks: Tensor) -> Tensor:
    """Invert unit triangular blocks [P, s, s, ...], given the part below their diagonal."""
    count = blocks.shape[1]
    identity = _create_identity(blocks[0, :, :, 0, 0]).view(count, count, 1, 1)
    rows = [identity[0].expand_as(blocks[:, 0])]
    for row in range(1, count):
        earlier = torch.stack(rows, dim=1)
        factors = blocks[:, row, :row].unsqueeze(2)
        rows.append(identity[row] - (factors * earlier).sum(dim=1))
    return torch.stack(rows, dim=1)


def _multiply_beside(x: Tensor, y: Tensor) -> Tensor:
    """Products of blocks [P, s, s, ...]."""
    return (x.unsqueeze(3) * y.unsqueeze(1)).sum(dim=2)


def _climb(lower: Tensor) -> Tensor:
    count, size = lower.shape[-1], 1
    first = min(SUB_BLOCK, count)
    blocks = cut_diagonal(lower, first)
    inverse = _create_identity(blocks).expand_as(blocks)
    while size < first:
        # X - X L_s X, where L_s is the part of L in the lower left quarters of blocks of 2 s.
        row = torch.arange(first, device=lower.device)
        block, half = row // (2 * size), row // size
        is_below = (block.unsqueeze(-1) == block) & (half.unsqueeze(-1) > half)
        inverse = inverse - inverse @ torch.where(is_below, blocks, 0.0) @ inverse
        size *= 2
    while size < count:
        below = cut_diagonal(lower, 2 * size)[..., size:, :size]
        first_half, second_half = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        inverse = join_blocks(inverse, -(second_half @ below @ first_half))
        size *= 2
    return inverse.squeeze(-3)


def _create_identity(x: Tensor) -> Tensor:
    return torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)


SOLVERS: dict[str, Callable[[Tensor], Tensor]] = {
    "auto": _solve,
    "triangular_solve": _solve,
    "ladder16": _climb,
    "rows": _substitute,
}
