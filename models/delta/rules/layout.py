"""Tokens [B, T, H, D] as chunks [N, B, H, C, D], masks, and how a chunked rule is computed."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from models.delta.kernels.backends import OWN, require_backend
from models.delta.rules.products import PRODUCTS
from models.delta.rules.solve import SOLVERS
from models.delta.rules.state_scan import LOOPS
from utils.errors import UserError
from utils.runtime.processes.sequence import count_sequence_parts
from utils.torch_types import DifferentiationRule

_LARGEST_CHUNK = 256
KERNELS = ("auto", "xla", "pallas")


@dataclass(frozen=True)
class CoreOptions:
    """How a chunked rule is computed; no option changes the result but for rounding."""

    chunk: int = 64  # tokens of a chunk, a power of two; fewer for shorter sequences
    # Of the triangular system: triangular_solve, ladder16 or rows; auto is the first, and rows
    # where the loop prepares a few chunks at a time
    solver: str = "auto"
    # Over chunks: scan (all chunks are prepared at once, then one loop of the device, if it has
    # one), blocks (the loop prepares a few chunks at a time) or unrolled; auto is blocks on a TPU
    # where gates are of heads, else scan
    loop: str = "auto"
    pad: bool = True  # whether tokens that fill no chunk are padded; else they are refused
    # Of a sequence, walked over at the same time, if it is a multiple; on a mesh with an axis for
    # sequences as many times its devices
    parts: int = 1
    # Of matrices: auto (float32 as the device multiplies it), or by parts of bfloat16 that are
    # summed in float32: bfloat16 (one), bfloat16x3 (two, in three products) or bfloat16x6 (three,
    # in six); nothing else is rounded
    products: str = "auto"
    # xla; pallas: the walk over chunks is a kernel, and `loop` has no effect; auto: the one that
    # costs fewer cycles for the shapes of the inputs
    kernels: str = "xla"
    # Own, or a package whose kernels layers use instead: fla, flash_qla or flashinfer
    backend: str = OWN

    def __post_init__(self) -> None:
        chunk = self.chunk
        is_size = type(chunk) is int and 2 <= chunk <= _LARGEST_CHUNK and not chunk & (chunk - 1)
        if not is_size:
            raise UserError(
                f"chunk ({chunk!r}) must be a power of two from 2 to {_LARGEST_CHUNK}; 64 is usual"
            )
        if type(self.parts) is not int or self.parts < 1:
            raise UserError(f"parts ({self.parts!r}) must be a whole number, 1 or more")
        require_backend(self.backend)
        choices = (SOLVERS, LOOPS, PRODUCTS, KERNELS)
        for name, known in zip(("solver", "loop", "products", "kernels"), choices, strict=True):
            value = getattr(self, name)
            if value not in known:
                raise UserError(f"{name} ({value!r}) is unknown; use one of {', '.join(known)}")
        if self.products != "auto" and self.kernels == "pallas":
            raise UserError(
                f"products ({self.products}) is not supported with kernels (pallas), which round "
                "in their own way; remove one of them"
            )
        if self.parts > 1 and self.kernels == "pallas":
            raise UserError(
                f"parts ({self.parts}) is not supported with kernels (pallas), which walk over a "
                "whole sequence; remove one of them"
            )

    @property
    def is_written_out(self) -> bool:
        """Whether chunks are walked over one by one, without a loop of the device."""
        return self.loop == "unrolled" and self.parts == 1

    def fit(self, tokens: int) -> int:
        """Return the chunk for so many tokens; a UserError if they need padding without `pad`."""
        if tokens % self.chunk and not self.pad:
            raise UserError(
                f"{tokens} tokens are no multiple of the chunk ({self.chunk}) and pad is false; "
                "change one of them"
            )
        return min(self.chunk, max(2, 1 << (tokens - 1).bit_length()))


@dataclass(frozen=True)
class ChunkPlan:
    """Options for some inputs: the chunk that fits, and whether a backward pass follows."""

    options: CoreOptions
    chunk: int
    keep: bool
    block: int = 0  # chunks of a step of the loop; 0 if all are prepared at once


@dataclass(frozen=True)
class Reach:
    """Masks of the chunks of packed sequences; None keeps everything."""

    pairs: Tensor | None = None  # bool [N, B, 1, C, C]: tokens of one sequence
    entry: Tensor | None = None  # bool [N, B, 1, C, 1]: tokens that see the state before the chunk
    exit: Tensor | None = None  # bool [N, B, 1, C, 1]: tokens that the state behind the chunk holds
    whole: Tensor | None = None  # bool [N, B, 1, 1]: the state before the chunk lives on behind it


def apply_in_chunks(
    rule: type[DifferentiationRule],
    parts: list[Tensor],
    state: Tensor,
    starts: Tensor | None,
    options: CoreOptions,
) -> tuple[Tensor, Tensor]:
    """Compute outputs [B, T, H, V] and the last state by a rule for whole chunks.

    `rule` is (plan, starts, *parts, state) -> outputs and state. Parts are [B, T, H, ...], the
    third v; `starts` is bool [B, T] of packed sequences. A UserError if tokens fill no chunks and
    may not be padded.
    """
    tokens, runs = parts[2].shape[1], math.lcm(options.parts, count_sequence_parts())
    length = -(-tokens // runs)
    options, chunk = replace(options, parts=runs), options.fit(length)
    starts = None if starts is None else _pad_runs(starts, runs, length, chunk)
    parts = [_pad_runs(x, runs, length, chunk) for x in parts]
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in (*parts, state))
    with in_full_width(parts[2]):
        output, state = rule.apply(ChunkPlan(options, chunk, keep), starts, *parts, state)
    if length % chunk:
        output = output.unflatten(1, (runs, -1))[:, :, :length].flatten(1, 2)
    return output[:, :tokens], state


def find_reach(starts: Tensor | None, chunk: int) -> Reach:
    """Compute the masks of starts [B, T], which is a whole number of chunks."""
    if starts is None:
        return Reach()
    runs = starts.to(torch.int32).unflatten(1, (-1, chunk)).transpose(0, 1).cumsum(dim=-1)
    runs = runs.unsqueeze(2).unsqueeze(-1)
    last = runs[..., -1:, :]
    whole = (last == 0).squeeze(-1)
    return Reach(runs == runs.transpose(-1, -2), runs == 0, runs == last, whole)


def keep_reached(x: Tensor, kept: Tensor | None) -> Tensor:
    """Return x where it is kept, else 0."""
    return x if kept is None else torch.where(kept, x, torch.zeros_like(x))


def to_chunks(x: Tensor, chunk: int, dtype: torch.dtype) -> Tensor:
    """[B, T, H, D] -> [N, B, H, C, D], cast behind the copy, so that it moves the narrower type."""
    return x.unflatten(1, (-1, chunk)).permute(1, 0, 3, 2, 4).to(dtype)


def from_chunks(x: Tensor) -> Tensor:
    """[N, B, H, C, D] -> [B, T, H, D]."""
    return x.permute(1, 0, 3, 2, 4).flatten(1, 2)


def in_full_width(x: Tensor) -> torch.autocast | contextlib.nullcontext[None]:
    """Return a context in which operations on the device of x keep the types of their inputs."""
    device = x.device.type
    if not _has_autocast(device):
        return contextlib.nullcontext()
    return torch.autocast(device_type=device, enabled=False)


# A constant for torch.compile, whose graph the call itself would break.
@torch.compiler.assume_constant_result
def _has_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device)


def _pad_runs(x: Tensor, runs: int, length: int, chunk: int) -> Tensor:
    """Cut tokens [B, T, ...] into runs of a length, each padded by zeros to whole chunks.

    Zeros change no state, and no token moves to another device.
    """
    x = _pad(x, 1, runs * length - x.shape[1])
    if not length % chunk:
        return x
    return _pad(x.unflatten(1, (runs, length)), 2, -length % chunk).flatten(1, 2)


def _pad(x: Tensor, dim: int, count: int) -> Tensor:
    return functional.pad(x, [0, 0] * (x.dim() - dim - 1) + [0, count]) if count else x
