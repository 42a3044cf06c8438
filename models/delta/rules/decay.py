"""Products of rows and columns of a chunk with the decay between them, and their gradients.

M[i, j] = sum_d x[i, d] y[j, d] exp(sum of g[t, d] over t from j + 1 to i), of j <= i. Gates are of
a head ([..., C, 1]) or of a channel ([..., C, K]). Every exponent is a sum of gates, none a
difference of long sums, and none is above 0: nothing overflows, whatever the gates are, and a gate
near 0 behind a strong one loses no digits. Masks are applied before the exponential.

A channel's decay cannot be pulled out of the product over the whole chunk. So the chunk is cut into
halves again and again down to sub-blocks: the boundary of two neighbouring blocks is the reference
row, up to which columns decay and from which rows do, and one matrix product serves the pair.
Within a sub-block the sum is taken element by element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.delta.rules.products import add_marked, multiply

SUB_BLOCK = 16


@dataclass(frozen=True)
class Pairing:
    """Which pairs of a chunk count, and which of their gates."""

    strict: bool = False  # only j < i
    before: bool = False  # the decay ends before the row's own gate (t up to i - 1); needs `strict`
    # bool [..., C, C] of the pairs of packed sequences that may count; None: all
    keep: Tensor | None = None
    products: str = "auto"  # how matrices are multiplied (`models.delta.rules.products`)
    # Of a head's gates, sums and transposed matrices are products of their own. Inside a loop these
    # sums are cheaper on a TPU than running sums, and its compiler takes minutes for a transpose of
    # 64 lanes that become bfloat16; for all chunks at once both would be traffic
    by_products: bool = False

    def multiply(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x @ y."""
        return multiply(x, y, self.products)


# Gradient's left side, x, pairing.
Rows = tuple[Tensor, Tensor, Pairing]


def sum_before(g: Tensor, *, before: bool = False) -> Tensor:
    """Sum gates [..., C, D] from the chunk's first row to each; `before` leaves out its own."""
    if g.shape[-1] == 1:
        return _sum_marked(g, _lower(g.shape[-2], strict=before, device=g.device))
    sums = g.cumsum(dim=-2)
    if not before:
        return sums
    return torch.cat([torch.zeros_like(g[..., :1, :]), sums[..., :-1, :]], dim=-2)


def sum_behind(g: Tensor) -> Tensor:
    """Sum gates [..., C, D] of the rows that follow each row."""
    if g.shape[-1] == 1:
        return _sum_marked(g, ~_lower(g.shape[-2], strict=False, device=g.device))
    sums = sum_to_end(g)
    return torch.cat([sums[..., 1:, :], torch.zeros_like(g[..., :1, :])], dim=-2)


def sum_to_end(g: Tensor) -> Tensor:
    """Sum [..., C, D] over each row and those that follow it."""
    return g.flip(-2).cumsum(dim=-2).flip(-2)


def sum_across(rows: Tensor, columns: Tensor) -> Tensor:
    """Add `sum_to_end` of rows and `sum_before` of columns without each row's own, [..., C, D]."""
    if rows.shape[-1] > 1:
        return sum_to_end(rows) + sum_before(columns, before=True)
    earlier = _lower(rows.shape[-2], strict=True, device=rows.device)
    return torch.where(earlier, columns.mT, rows.mT).sum(dim=-1, keepdim=True)


def _sum_marked(g: Tensor, marks: Tensor) -> Tensor:
    """Sum for each row of [..., C, 1] the rows that its row of marks [C, C] names.

    XLA's running sum of single numbers goes over almost empty registers; this one is a full tile.
    """
    row = g.transpose(-1, -2)
    return torch.where(marks, row, torch.zeros_like(row)).sum(dim=-1, keepdim=True)


def multiply_pairs(x: Tensor, y: Tensor, g: Tensor, pairing: Pairing) -> Tensor:
    """Compute [..., C, C] of rows x and columns y [..., C, K], 0 where no pair counts."""
    if g.shape[-1] == 1:
        return pairing.multiply(x, y.transpose(-1, -2)) * _decay_of_head(g, pairing)
    size, count = min(SUB_BLOCK, x.shape[-2]), x.shape[-2]
    rows, columns, gates = (_cut(z, size) for z in (x, y, g))
    inside = _decay_inside(gates, pairing)
    blocks = (rows.unsqueeze(-2) * columns.unsqueeze(-3) * inside).sum(dim=-1)
    while size < count:
        # Rows of the second half and columns of the first of each pair of blocks, decayed.
        ends, begins = _decay_halves(g, size, pairing)
        rows, columns = _cut(x, 2 * size)[..., size:, :], _cut(y, 2 * size)[..., :size, :]
        rows, columns = rows * ends, columns * begins
        blocks = join_blocks(blocks, pairing.multiply(rows, columns.transpose(-1, -2)))
        size *= 2
    return _drop(blocks.squeeze(-3), pairing.keep)


def multiply_pairs_turned(x: Tensor, y: Tensor, g: Tensor, pairing: Pairing) -> Tensor:
    """Compute `multiply_pairs` with rows and columns exchanged."""
    if pairing.by_products and g.shape[-1] == 1:
        return pairing.multiply(y, x.transpose(-1, -2)) * _decay_of_head_turned(g, pairing)
    return multiply_pairs(x, y, g, pairing).transpose(-1, -2)


def pull_pairs(
    grad: tuple[Tensor, Tensor], x: Tensor, y: Tensor, g: Tensor, pairing: Pairing
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of x, y and g, from that of `multiply_pairs`.

    A gate's is the sum over the pairs that it stands between. The difference of the sums up to rows
    and behind columns, x dx - y dy, would be cheaper, but only rounding errors for a strong gate.
    `grad`: left and right [..., C, V]; left right^T is the gradient [..., C, C].
    """
    left, right = grad
    if g.shape[-1] == 1:
        (to_x,), to_y, to_g = _pull_rows_of_head([(left, x, pairing)], right, y, g)
        return to_x, to_y, to_g
    whole = _drop(pairing.multiply(left, right.transpose(-1, -2)), pairing.keep)
    size, count = min(SUB_BLOCK, x.shape[-2]), x.shape[-2]
    rows, columns, gates = (_cut(z, size) for z in (x, y, g))
    inside = _decay_inside(gates, pairing) * cut_diagonal(whole, size).unsqueeze(-1)
    from_columns, from_rows = inside * columns.unsqueeze(-3), inside * rows.unsqueeze(-2)
    grads = (
        from_columns.sum(dim=-2).flatten(-3, -2),
        from_rows.sum(dim=-3).flatten(-3, -2),
        _sum_between(from_columns * rows.unsqueeze(-2), pairing).flatten(-3, -2),
    )
    while size < count:
        lower = cut_diagonal(whole, 2 * size)[..., size:, :size]
        level = _pull_halves(lower, (x, y, g), size, pairing)
        grads = (grads[0] + level[0], grads[1] + level[1], grads[2] + level[2])
        size *= 2
    return grads


def pull_rows(
    rows: Sequence[Rows], right: Tensor, y: Tensor, g: Tensor
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Compute `pull_pairs` of several sorts of rows with the same columns; y's and g's are sums.

    Args:
      rows: the left side of its gradient, x and pairing of each; pairings differ only in `strict`.
      right: of all gradients.
    """
    if g.shape[-1] == 1:
        return _pull_rows_of_head(rows, right, y, g)
    grads = [pull_pairs((left, right), x, y, g, pairing) for left, x, pairing in rows]
    to_x, to_y, to_g = zip(*grads, strict=True)
    return list(to_x), sum(to_y[1:], to_y[0]), sum(to_g[1:], to_g[0])


def _pull_rows_of_head(
    rows: Sequence[Rows], right: Tensor, y: Tensor, g: Tensor
) -> tuple[list[Tensor], Tensor, Tensor]:
    to_x: list[Tensor] = []
    of_y: list[Tensor] = []
    counted: list[Tensor] = []
    for left, x, pairing in rows:
        decayed = pairing.multiply(left, right.transpose(-1, -2)) * _decay_of_head(g, pairing)
        counted.append(decayed * pairing.multiply(x, y.transpose(-1, -2)))
        to_x.append(pairing.multiply(decayed, y))
        if pairing.by_products:
            turned = multiply_pairs_turned(left, right, g, pairing)
        else:
            turned = decayed.transpose(-1, -2)
        of_y.append(pairing.multiply(turned, x))
    total, pairing = sum(counted[1:], counted[0]), rows[0][2]
    if pairing.by_products:
        between = _sum_between_of_head(total, pairing)
    else:
        between = _sum_between(total.unsqueeze(-1), pairing)
    return to_x, sum(of_y[1:], of_y[0]), between


def _pull_halves(
    lower: Tensor, given: tuple[Tensor, Tensor, Tensor], size: int, pairing: Pairing
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of what stands below pairs of blocks: rows of second halves, columns of first."""
    x, y, g = given
    ends, begins = _decay_halves(g, size, pairing)
    firsts, seconds = _cut(y, 2 * size)[..., :size, :], _cut(x, 2 * size)[..., size:, :]
    to_rows = ends * pairing.multiply(lower, firsts * begins)
    to_columns = begins * pairing.multiply(lower.transpose(-1, -2), seconds * ends)
    up_to = sum_behind if pairing.before else sum_to_end
    of_firsts, of_seconds = sum_before(firsts * to_columns, before=True), up_to(seconds * to_rows)
    none = torch.zeros_like(to_rows)
    halves = ((none, to_rows), (to_columns, none), (of_firsts, of_seconds))
    to_x, to_y, to_g = (torch.cat(pair, dim=-2).flatten(-3, -2) for pair in halves)
    return to_x, to_y, to_g


def _sum_between(products: Tensor, pairing: Pairing) -> Tensor:
    """Sum products of pairs [..., C, C, D] over the pairs that each gate decays: [..., C, D]."""
    up_to = sum_behind if pairing.before else sum_to_end
    sums = up_to(products.flatten(-2)).unflatten(-1, products.shape[-2:])
    earlier = _lower(products.shape[-3], strict=True, device=products.device).unsqueeze(-1)
    return torch.where(earlier, sums, torch.zeros_like(sums)).sum(dim=-2)


def _sum_between_of_head(products: Tensor, pairing: Pairing) -> Tensor:
    """Compute the same [..., C, 1] of [..., C, C]: columns before each gate are added."""
    count, device = products.shape[-1], products.device
    sums = add_marked(products, ~_lower(count, strict=False, device=device))
    behind = _lower(count, strict=pairing.before, device=device)
    return torch.where(behind, sums, torch.zeros_like(sums)).sum(dim=-2).unsqueeze(-1)


def _decay_of_head(g: Tensor, pairing: Pairing) -> Tensor:
    """[..., C, C] of gates [..., C, 1]: for each row the gates behind column j are added up."""
    count = g.shape[-2]
    lower = _lower(count, strict=True, device=g.device)
    if pairing.by_products:
        row, up_to = g.transpose(-1, -2), _lower(count, strict=pairing.before, device=g.device)
        sums = add_marked(torch.where(up_to, row, torch.zeros_like(row)), lower)
    else:
        sums = torch.where(lower, g, torch.zeros_like(g)).cumsum(dim=-2)
        if pairing.before:
            sums = torch.cat([torch.zeros_like(sums[..., :1, :]), sums[..., :-1, :]], dim=-2)
    counts = _lower(count, strict=pairing.strict, device=g.device)
    if pairing.keep is not None:
        counts = counts & pairing.keep
    return torch.where(counts, sums, -torch.inf).exp()


def _decay_of_head_turned(g: Tensor, pairing: Pairing) -> Tensor:
    """Compute the same, columns first: for each the gates behind it are added up to rows."""
    count, row = g.shape[-2], g.transpose(-1, -2)
    behind = ~_lower(count, strict=False, device=g.device)
    gates = torch.where(behind, row, torch.zeros_like(row))
    up_to = ~_lower(count, strict=not pairing.before, device=g.device)
    sums = add_marked(gates, up_to)
    counts = ~_lower(count, strict=not pairing.strict, device=g.device)
    if pairing.keep is not None:
        counts = counts & pairing.keep.transpose(-1, -2)
    return torch.where(counts, sums, -torch.inf).exp()


def _decay_inside(gates: Tensor, pairing: Pairing) -> Tensor:
    """[..., n, s, s, K] of gates [..., n, s, K] cut into sub-blocks."""
    rows = sum_before(gates, before=pairing.before)
    sums = rows.unsqueeze(-2) - sum_before(gates).unsqueeze(-3)
    counts = _lower(gates.shape[-2], strict=pairing.strict, device=gates.device)
    return torch.where(counts.unsqueeze(-1), sums, -torch.inf).exp()


def _decay_halves(g: Tensor, size: int, pairing: Pairing) -> tuple[Tensor, Tensor]:
    """Decay of second halves since the boundary, and of first ones up to it: [..., n, s, K]."""
    pairs = _cut(g, 2 * size)
    ends = sum_before(pairs[..., size:, :], before=pairing.before)
    return ends.exp(), sum_behind(pairs[..., :size, :]).exp()


def join_blocks(blocks: Tensor, lower: Tensor) -> Tensor:
    """Pairs of blocks [..., 2 n, s, s] and what is below each, as [..., n, 2 s, 2 s]."""
    first, second = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
    upper = torch.cat([first, torch.zeros_like(first)], dim=-1)
    return torch.cat([upper, torch.cat([lower, second], dim=-1)], dim=-2)


def _cut(x: Tensor, size: int) -> Tensor:
    """[..., C, D] -> [..., C / s, s, D]."""
    return x.unflatten(-2, (-1, size))


def cut_diagonal(x: Tensor, size: int) -> Tensor:
    """The blocks on the diagonal of [..., C, C]: [..., C / s, s, s]."""
    tiles = x.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))
    return tiles.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _drop(x: Tensor, keep: Tensor | None) -> Tensor:
    return x if keep is None else torch.where(keep, x, torch.zeros_like(x))


def _lower(count: int, *, strict: bool, device: torch.device) -> Tensor:
    columns = torch.arange(count, device=device)
    rows = columns.unsqueeze(-1)
    return columns < rows if strict else columns <= rows
