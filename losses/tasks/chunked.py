"""A head and its loss chunk by chunk over the sequence: all logits never exist at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

# Logits [B, n, V] of a chunk and its places -> what is trained on, summed, and detached sums [S].
Score = Callable[[Tensor, slice], tuple[Tensor, Tensor]]
_FLOAT32_BYTES = 4
_MIB = 1 << 20


def choose_chunk(examples: int, length: int, vocab_size: int, limit_mib: float) -> int:
    """Tokens of each example whose float32 logits fit into a limit; 0: not even one fits."""
    fitting = int(limit_mib * _MIB) // (_FLOAT32_BYTES * examples * vocab_size)
    if fitting >= length or not fitting:
        return min(fitting, length)
    return -(-length // -(-length // fitting))  # of equal size, but for the last


def score_in_chunks(
    hidden: Tensor, weight: Tensor, score: Score, chunk: int, *, devices: int = 1, parts: int = 1
) -> tuple[Tensor, Tensor]:
    """Sums of `score` over all chunks of a sequence.

    The gradient of each chunk is taken while its logits are there: nothing of them is kept, and
    nothing is computed twice. What else a score looks at (a teacher's hidden states, from which it
    makes the logits of the same places) gets no gradient.

    Args:
      hidden: [B, T, C].
      weight: [V, C] of the head.
      chunk: places of a chunk; the last one may hold fewer.
      devices: of a mesh, that the examples are dealt to. Each adds the weight's gradient of all
        chunks up by itself, so that a step sums over devices once, in float32.
      parts: of a sequence, each with devices of its own; a chunk has places of all of them.

    Returns:
      The scalar, which carries gradients to `hidden` and `weight`, and the detached sums [S].
    """
    if not torch.is_grad_enabled():
        # The function would be told of the weight's gradient all the same, and compute it.
        hidden, weight = hidden.detach(), weight.detach()
    apart = devices if len(hidden) % devices == 0 else 1
    places = list(iterate_chunks(hidden.shape[1], chunk, parts))
    return _ScoreInChunks.apply(hidden, weight, score, places, apart)


def iterate_chunks(length: int, chunk: int, parts: int = 1) -> Iterator[slice]:
    """The places of each chunk of a sequence; the last one may be shorter.

    Args:
      parts: of the sequence, equal ones; of several, every so-manieth place, so that each part
        has as many of a chunk.
    """
    if parts > 1:
        own = length // parts
        count = next(n for n in range(1, own + 1) if own % n == 0 and length <= n * chunk)
        yield from (slice(start, length, count) for start in range(count))
        return
    for start in range(0, length, chunk):
        yield slice(start, min(start + chunk, length))


class _ScoreInChunks(torch.autograd.Function):
    """Keeps the two gradients for a factor of one, which the backward pass scales."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, score: Score, chunks: list[slice], devices: int
    ) -> tuple[Tensor, Tensor]:
        needs = ctx.needs_input_grad[:2]
        with torch.autocast(hidden.device.type, enabled=False):
            cast = weight.to(hidden.dtype)
            total = sums = d_weight = None
            d_hidden = []
            for places in chunks:
                part = hidden[:, places]
                logits = torch.einsum("btc,vc->btv", part, cast)
                value, counted, slope = _score_chunk(logits, score, places, any(needs))
                total = value if total is None else total + value
                sums = counted if sums is None else sums + counted
                if needs[0]:
                    d_hidden.append(torch.einsum("btv,vc->btc", slope, cast))
                if needs[1]:
                    own = _multiply(slope, part, devices)
                    d_weight = own if d_weight is None else d_weight + own
            if d_weight is not None and devices > 1:
                d_weight = d_weight.sum(dim=0)
        ctx.save_for_backward(_join(d_hidden, chunks) if d_hidden else None, d_weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        ctx.mark_non_differentiable(sums)
        return total, sums

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [
            None if kept is None else (kept.float() * gradient).to(dtype)
            for kept, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None, None


def _join(found: list[Tensor], chunks: list[slice]) -> Tensor:
    """[B, T, C] of its chunks."""
    if chunks[0].step is None:
        return torch.cat(found, dim=1)
    return torch.stack(found, dim=2).flatten(1, 2)


def _multiply(slope: Tensor, part: Tensor, devices: int) -> Tensor:
    """Float32 gradient [V, C] of a chunk's weight; of several devices one each, [D, V, C]."""
    if devices == 1:
        return torch.einsum("btv,btc->vc", slope, part).float()
    # A product in bfloat16 would be rounded before the sum over devices.
    left, right = (one.float().unflatten(0, (devices, -1)) for one in (slope, part))
    return torch.einsum("zbtv,zbtc->zvc", left, right)


def _score_chunk(
    logits: Tensor, score: Score, places: slice, needs_gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The value and the sums of a chunk, and the value's gradient by its logits in their type."""
    with torch.set_grad_enabled(needs_gradient):
        leaf = logits.float().detach().requires_grad_(needs_gradient)
        value, sums = score(leaf, places)
    slope = None
    if needs_gradient:
        (slope,) = torch.autograd.grad(value, leaf)
        slope = slope.to(logits.dtype)
    return value.detach(), sums.detach(), slope


def pick(values: Tensor, indices: Tensor) -> Tensor:
    """values[..., indices] of [..., V] by comparison, which fuses where a gather would not."""
    places = torch.arange(values.shape[-1], device=values.device, dtype=indices.dtype)
    return torch.where(places == indices[..., None], values, 0.0).sum(dim=-1)


def count_next_tokens(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Nats and log-sum-exp of each place, float32 [B, n].

    Args:
      logits: [B, n, V].
      targets: int [B, n].
    """
    normaliser = torch.logsumexp(logits, dim=-1)
    return normaliser - pick(logits, targets), normaliser


def find_right_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    """Whether the likeliest token is the next one, float32 [B, n]; of equals one alone counts.

    Args:
      logits: [B, n, V].
      targets: int [B, n].
    """
    return (logits.argmax(dim=-1) == targets).float()
