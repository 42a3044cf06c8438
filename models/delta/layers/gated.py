"""The layers around a delta rule: short convolution, norms, gates; names as on the Hub."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.delta.kernels.backends import OWN, require_gpu, run_backend
from models.delta.kernels.decode_step import step_rule
from models.delta.kernels.operators import require_kernels, resolve_step
from models.delta.rules.chunked import chunk_delta_rule
from models.delta.rules.dplr import chunk_dplr
from models.delta.rules.inputs import DeltaInputs, DplrInputs, Inputs
from models.delta.rules.layout import CoreOptions
from models.delta.rules.recurrence import recur_delta_rule, recur_dplr
from models.transformer import LayerCache, RmsNorm
from utils.errors import UserError
from utils.runtime.processes.sequence import look_back

# Range of the first rates of forgetting; the least keeps its logarithm finite.
_RATES = (0.01, 16.0)
# Range of the first steps of gates, where they are drawn.
_STEPS = (1e-3, 1e-1)


class DeltaCache:
    """A layer's memory of earlier tokens: a state [B, H, K, V], the convolution's last inputs.

    Those are `tail` [B, W - 1, C]; both are None before the first tokens.
    """

    def __init__(self) -> None:
        self.state: Tensor | None = None
        self.tail: Tensor | None = None

    def keep(self, state: Tensor, tail: Tensor) -> None:
        """Store the next state; later ones are written into the same tensors."""
        if self.state is None or self.tail is None:
            self.state, self.tail = state, tail
            return
        self.state.copy_(state)
        self.tail.copy_(tail)


AnyCache = LayerCache | DeltaCache


class CentredRmsNorm(nn.Module):
    """x / rms(x) * (1 + weight) over the last dimension, in float32; x's type."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return (scale_to_unit(x.float(), self.eps) * (1.0 + self.weight.float())).to(x.dtype)


class GatedRmsNorm(RmsNorm):
    """x / rms(x) * weight * silu(gate) over the last dimension, in float32; x's type."""

    # pyrefly: ignore[bad-override]  # a norm with a gate is called as such
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        normed = self.weight * scale_to_unit(x.float(), self.eps)
        return (normed * functional.silu(gate.float())).to(x.dtype)


class ShortConvolution(nn.Module):
    """Each channel's last W inputs, weighted: W shifted products, which XLA fuses.

    Source: the causal depthwise convolution of fla's layers; weight [C, 1, W] as in `Conv1d`.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        nn.init.uniform_(self.weight, -(width**-0.5), width**-0.5)

    def forward(self, x: Tensor, tail: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Convolve [B, T, C] behind `tail` [B, W - 1, C], zeros if None; return the next tail."""
        width = self.weight.shape[2]
        if tail is None:
            tail = x.new_zeros(x.shape[0], width - 1, x.shape[2])
        seen = look_back(x, tail)
        count, taps = seen.shape[2] - tail.shape[1], self.weight[:, 0].to(x.dtype)
        mixed: Any = sum(seen[:, :, n : n + count] * taps[:, n] for n in range(width))
        return mixed.flatten(1, 2), seen[:, -1, count:]


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet of Qwen3.5: one decay of a head, keys shared by groups of heads.

    `heads` and `widths` of a head are of keys and of values; `conv_width` is the convolution's
    taps.

    Source: Yang et al. 2024, arXiv:2412.06464; names of weights as in Qwen3.5.
    """

    def __init__(
        self,
        width: int,
        heads: tuple[int, int],
        widths: tuple[int, int],
        *,
        conv_width: int,
        options: CoreOptions,
    ) -> None:
        super().__init__()
        self.heads, self.widths, self.options = heads, widths, options
        self.sizes = (heads[0] * widths[0], heads[0] * widths[0], heads[1] * widths[1])
        self._create_projections(width)
        self.conv1d = ShortConvolution(sum(self.sizes), conv_width)
        self.dt_bias = nn.Parameter(torch.ones(heads[1]))
        self.A_log = nn.Parameter(torch.empty(heads[1]).uniform_(*_RATES).log())
        self.norm = GatedRmsNorm(widths[1])
        self.out_proj = nn.Linear(self.sizes[2], width, bias=False)

    def forward(self, x: Tensor, cache: DeltaCache | None = None) -> Tensor:
        """[B, T, C] -> [B, T, C]; with a cache the tokens follow those of earlier calls."""
        projected, gate, write, rate = self._project(x)
        mixed, tail = self.conv1d(projected, None if cache is None else cache.tail)
        q, k, v = functional.silu(mixed).split(self.sizes, dim=-1)
        q, k = (scale_to_length_one(self._split(y, self.widths[0])) for y in (q, k))
        write = write.float().sigmoid()
        inputs = DeltaInputs(
            q=q * self.widths[0] ** -0.5,
            k=k,
            v=self._split(v, self.widths[1]),
            g=-self.A_log.float().exp() * functional.softplus(rate.float() + self.dt_bias.float()),
            erase=write,
            write=write,
        )
        output = run_rule(inputs, tail, cache, self.options)
        gate = self._split(gate, self.widths[1])
        return self.out_proj(self.norm(output.to(x.dtype), gate).flatten(2))

    def _create_projections(self, width: int) -> None:
        self.in_proj_qkv = nn.Linear(width, sum(self.sizes), bias=False)
        self.in_proj_z = nn.Linear(width, self.sizes[2], bias=False)
        self.in_proj_b = nn.Linear(width, self.heads[1], bias=False)
        self.in_proj_a = nn.Linear(width, self.heads[1], bias=False)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values in one, the output's gate, and logits of write and of rate."""
        return self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)

    def _split(self, x: Tensor, width: int) -> Tensor:
        """[B, T, H * D] -> [B, T, H, D]."""
        return x.unflatten(-1, (-1, width))


class PackedDeltaNet(GatedDeltaNet):
    """Gated DeltaNet of Qwen3-Next: two projections, packed by heads of keys."""

    def _create_projections(self, width: int) -> None:
        self.in_proj_qkvz = nn.Linear(width, sum(self.sizes) + self.sizes[2], bias=False)
        self.in_proj_ba = nn.Linear(width, 2 * self.heads[1], bias=False)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        keys, values = self.heads
        own = values // keys * self.widths[1]
        packed = self.in_proj_qkvz(x).unflatten(-1, (keys, -1))
        q, k, v, gate = packed.split([self.widths[0], self.widths[0], own, own], dim=-1)
        write, rate = self.in_proj_ba(x).unflatten(-1, (keys, -1)).chunk(2, dim=-1)
        mixed = torch.cat([y.flatten(2) for y in (q, k, v)], dim=-1)
        return mixed, gate.flatten(2), write.flatten(2), rate.flatten(2)


def draw_step_bias(count: int) -> Tensor:
    """Draw biases whose softplus is a step of `_STEPS`, uniform in its logarithm."""
    steps = torch.empty(count).uniform_(*map(math.log, _STEPS)).exp()
    return steps + torch.log(-torch.expm1(-steps))


def run_rule(
    inputs: Inputs, tail: Tensor, cache: DeltaCache | None, options: CoreOptions
) -> Tensor:
    """Compute outputs [B, T, H, V] of a rule: chunks of a sequence or prompt, a step of decoding.

    A cache keeps `tail`, the layer's last inputs, beside the state. A UserError for options of
    `model.args` that these inputs, or their device, do not support.
    """
    tokens, updates = inputs.q.shape[1], inputs.v.shape[1]
    if cache is None:
        if not options.pad and options.backend == OWN and updates % options.chunk:
            each = "" if updates == tokens else f", of {updates // tokens} updates each"
            raise UserError(
                f"model.args.pad (False): data.sequence_length ({tokens}{each}) is no multiple of "
                f"model.args.chunk ({options.chunk}); change one of them"
            )
        return _run_tokens(inputs, None, options)[0]
    if tokens == 1:
        output, state = _run_step(inputs, cache.state, options)
    else:
        # Prompts have any length.
        output, state = _run_tokens(inputs, cache.state, replace(options, pad=True))
    cache.keep(state, tail)
    return output


def _run_tokens(
    inputs: Inputs, state: Tensor | None, options: CoreOptions
) -> tuple[Tensor, Tensor]:
    """Compute a sequence or a prompt, by a package or a chunk at a time."""
    if options.backend == OWN:
        if isinstance(inputs, DplrInputs):
            return chunk_dplr(inputs, state, options=options)
        return chunk_delta_rule(inputs, state, options=options)
    require_gpu(options.backend, inputs.v)
    return run_backend(options.backend, inputs, state)


def _run_step(inputs: Inputs, state: Tensor | None, options: CoreOptions) -> tuple[Tensor, Tensor]:
    """Compute one token; by a kernel only without gradients, which it does not compute."""
    options = resolve_step(options, inputs)
    if options.kernels == "pallas" and not torch.is_grad_enabled():
        require_kernels(inputs.v.device, inputs.v.dtype)
        return step_rule(inputs, state)
    if isinstance(inputs, DplrInputs):
        return recur_dplr(inputs, state)
    return recur_delta_rule(inputs, state)


def scale_to_unit(x: Tensor, eps: float) -> Tensor:
    """Divide x by its root mean square."""
    return x * torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + eps)


def scale_to_length_one(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Divide x by its length, in float32."""
    wide = x.float()
    return wide * torch.rsqrt((wide * wide).sum(dim=-1, keepdim=True) + eps)
