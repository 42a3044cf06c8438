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

from models.delta.rules.decay import SUB_BLOCK, cut_diagonal, join_blocks
from utils.errors import UserError


def invert(lower: Tensor, solver: str) -> Tensor:
    """(I + L)^-1 by one of `SOLVERS`.

    Raises:
      UserError: there is no such solver.
    """
    if solver not in SOLVERS:
        raise UserError(f"solver ({solver!r}) is none of {', '.join(SOLVERS)}; choose one")
    return SOLVERS[solver](lower)


def invert_beside(lower: Tensor, solver: str) -> Tensor:
    """The same of systems [N, B, H, C, C], with those of an example as one dimension.

    A TPU takes as many at once as the last of their dimensions holds, one in each lane.
    """
    found = invert(lower.transpose(0, 1).flatten(1, 2), solver)
    return found.unflatten(1, (lower.shape[0], -1)).transpose(0, 1)


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
    """By elements alone, all systems side by side: no product, nothing rounded to bfloat16.

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
    places = range(0, systems.shape[0], size)
    return torch.stack([systems[x + down : x + size, x : x + width] for x in places])


def _substitute_rows(blocks: Tensor) -> Tensor:
    """The inverses of unit triangular blocks [P, s, s, ...], given what is below their diagonal."""
    count = blocks.shape[1]
    one = _create_identity(blocks[0, :, :, 0, 0]).view(count, count, 1, 1)
    rows = [one[0].expand_as(blocks[:, 0])]
    for place in range(1, count):
        known = torch.stack(rows, dim=1)
        row = blocks[:, place, :place].unsqueeze(2)
        rows.append(one[place] - (row * known).sum(dim=1))
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
    "auto": _solve,
    "triangular_solve": _solve,
    "ladder16": _climb,
    "rows": _substitute,
}
