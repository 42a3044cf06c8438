"""Computes a head and its loss in chunks of the sequence, so that all logits never coexist."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from utils.torch_types import Ctx, DifferentiationRule

# Logits [B, n, V] of a chunk and its places -> what is trained on, summed, and detached sums [S].
Score = Callable[[Tensor, slice], tuple[Tensor, Tensor]]
_FLOAT32_BYTES = 4
_MIB = 1 << 20


def choose_chunk(examples: int, length: int, vocab_size: int, limit_mib: float) -> int:
    """Return the tokens of each example whose float32 logits fit into a limit; 0 if none fit."""
    fitting = int(limit_mib * _MIB) // (_FLOAT32_BYTES * examples * vocab_size)
    if fitting >= length or not fitting:
        return min(fitting, length)
    return -(-length // -(-length // fitting))  # of equal size, but for the last


def score_in_chunks(
    hidden: Tensor, weight: Tensor, score: Score, chunk: int, *, devices: int = 1, parts: int = 1
) -> tuple[Tensor, Tensor]:
    """Sum `score` over all chunks of a sequence.

    The gradient of each chunk is computed while its logits exist, so that nothing of them is kept
    and nothing is computed twice. Other inputs of a score (a teacher's hidden states, from which it
    computes logits of the same positions) get no gradient.

    Args:
      hidden: [B, T, C].
      weight: [V, C] of the head.
      chunk: positions of a chunk; the last one may hold fewer.
      devices: of a mesh, over which the examples are distributed. Each adds up the weight's
        gradient of all chunks alone, so that a step sums over devices once, in float32.
      parts: of a sequence, each with devices of its own; a chunk has positions of all of them.

    Returns:
      The scalar, which carries gradients to `hidden` and `weight`, and the detached sums [S].
    """
    if not torch.is_grad_enabled():
        # Otherwise the function would see that the weight needs a gradient and compute it.
        hidden, weight = hidden.detach(), weight.detach()
    apart = devices if len(hidden) % devices == 0 else 1
    places = list(iterate_chunks(hidden.shape[1], chunk, parts))
    return _ScoreInChunks.apply(hidden, weight, score, places, apart)


def iterate_chunks(length: int, chunk: int, parts: int = 1) -> Iterator[slice]:
    """Yield the positions of each chunk of a sequence; the last one may be shorter.

    `parts`: equal parts of the sequence; if there are several, a chunk takes every n-th position,
    so that each part has equally many of a chunk.
    """
    if parts > 1:
        own = length // parts
        count = next(n for n in range(1, own + 1) if own % n == 0 and length <= n * chunk)
        yield from (slice(start, length, count) for start in range(count))
        return
    for start in range(0, length, chunk):
        yield slice(start, min(start + chunk, length))


class _ScoreInChunks(DifferentiationRule):
    """A function that keeps both gradients for an output gradient of 1; backward scales them."""

    @staticmethod
    def forward(
        ctx: Ctx, hidden: Tensor, weight: Tensor, score: Score, chunks: list[slice], devices: int
    ) -> tuple[Tensor, Tensor]:
        needs = ctx.needs_input_grad[:2]
        with torch.autocast(hidden.device.type, enabled=False):
            cast = weight.to(hidden.dtype)
            total: Tensor | None = None
            sums: Tensor | None = None
            d_weight: Tensor | None = None
            d_hidden = []
            for places in chunks:
                part = hidden[:, places]
                logits = torch.einsum("btc,vc->btv", part, cast)
                value, counted, slope = _score_chunk(logits, score, places, any(needs))
                total = value if total is None else total + value
                sums = counted if sums is None else sums + counted
                if needs[0] and slope is not None:
                    d_hidden.append(torch.einsum("btv,vc->btc", slope, cast))
                if needs[1] and slope is not None:
                    own = _multiply(slope, part, devices)
                    d_weight = own if d_weight is None else d_weight + own
            if d_weight is not None and devices > 1:
                d_weight = d_weight.sum(dim=0)
        ctx.save_for_backward(_join(d_hidden, chunks) if d_hidden else None, d_weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        assert total is not None and sums is not None  # there is a chunk
        ctx.mark_non_differentiable(sums)
        return total, sums

    @staticmethod
    def backward(ctx: Ctx, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [
            None if kept is None else (kept.float() * gradient).to(dtype)
            for kept, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None, None


def _join(parts: list[Tensor], chunks: list[slice]) -> Tensor:
    """Return [B, T, C] of its chunks."""
    if chunks[0].step is None:
        return torch.cat(parts, dim=1)
    return torch.stack(parts, dim=2).flatten(1, 2)


def _multiply(slope: Tensor, part: Tensor, devices: int) -> Tensor:
    """Return the float32 gradient [V, C] of a chunk's weight; [D, V, C] of several devices."""
    if devices == 1:
        return torch.einsum("btv,btc->vc", slope, part).float()
    # A product in bfloat16 would be rounded before the sum over devices.
    left, right = (side.float().unflatten(0, (devices, -1)) for side in (slope, part))
    return torch.einsum("zbtv,zbtc->zvc", left, right)


def _score_chunk(
    logits: Tensor, score: Score, places: slice, needs_gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute a chunk's value and sums, and the value's gradient by its logits in their dtype."""
    with torch.set_grad_enabled(needs_gradient):
        leaf = logits.float().detach().requires_grad_(needs_gradient)
        value, sums = score(leaf, places)
    slope = None
    if needs_gradient:
        (slope,) = torch.autograd.grad(value, leaf)
        slope = slope.to(logits.dtype)
    return value.detach(), sums.detach(), slope


def pick(values: Tensor, indices: Tensor) -> Tensor:
    """Return values[..., indices] of [..., V] by comparison, which fuses unlike a gather."""
    places = torch.arange(values.shape[-1], device=values.device, dtype=indices.dtype)
    return torch.where(places == indices[..., None], values, 0.0).sum(dim=-1)


def count_next_tokens(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Compute nats and log-sum-exp, float32 [B, n], of logits [B, n, V] and int targets [B, n]."""
    normaliser = torch.logsumexp(logits, dim=-1)
    return normaliser - pick(logits, targets), normaliser


def find_right_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    """Return float32 [B, n], 1 where the likeliest token (the first of equals) is the next one."""
    return (logits.argmax(dim=-1) == targets).float()
