"""The layers around a delta rule: short convolution, norms, gates; names as on the Hub."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.delta.kernels.backends import OWN, require_gpu, run_backend
from models.delta.kernels.decode_step import step_rule
from models.delta.kernels.operators import require_kernels, settle_step
from models.delta.rules.chunked import chunk_delta_rule
from models.delta.rules.dplr import chunk_dplr
from models.delta.rules.inputs import DeltaInputs, DplrInputs
from models.delta.rules.layout import CoreOptions
from models.delta.rules.recurrence import recur_delta_rule, recur_dplr
from models.transformer import RmsNorm
from utils.errors import UserError
from utils.runtime.processes.sequence import look_back

# The largest rate of forgetting that a layer begins with, and the least one, which keeps its
# logarithm finite.
_RATES = (0.01, 16.0)
# Steps that gates begin with, where they are drawn.
_STEPS = (1e-3, 1e-1)


class DeltaCache:
    """What a layer knows of the tokens that it has seen: a state, and the convolution's last
    inputs.

    Attributes:
      state: [B, H, K, V]; none: nothing seen yet.
      tail: [B, W - 1, C].
    """

    def __init__(self) -> None:
        self.state: Tensor | None = None
        self.tail: Tensor | None = None

    def keep(self, state: Tensor, tail: Tensor) -> None:
        """Take what follows; where there is something already it is written over, not replaced."""
        if self.state is None or self.tail is None:
            self.state, self.tail = state, tail
            return
        self.state.copy_(state)
        self.tail.copy_(tail)


class CentredRmsNorm(nn.Module):
    """x / rms(x) * (1 + weight) over the last dimension, in float32; weights begin at 0."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """In the type of x."""
        return (scale_to_unit(x.float(), self.eps) * (1.0 + self.weight.float())).to(x.dtype)


class GatedRmsNorm(RmsNorm):
    """x / rms(x) * weight * silu(gate) over the last dimension, in float32."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """In the type of x."""
        normed = self.weight * scale_to_unit(x.float(), self.eps)
        return (normed * functional.silu(gate.float())).to(x.dtype)


class ShortConvolution(nn.Module):
    """Each channel's last W inputs, weighted: W shifted products, which fuse where a kernel does
    not.

    Source: the causal depthwise convolution of fla's layers; the weight is [C, 1, W] as `Conv1d`
      has
    it.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        nn.init.uniform_(self.weight, -(width**-0.5), width**-0.5)

    def forward(self, x: Tensor, tail: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[B, T, C] convolved, and the last W - 1 inputs.

        Args:
          tail: inputs [B, W - 1, C] before the first; none: zeros.
        """
        width = self.weight.shape[2]
        if tail is None:
            tail = x.new_zeros(x.shape[0], width - 1, x.shape[2])
        seen = look_back(x, tail)
        count, taps = seen.shape[2] - tail.shape[1], self.weight[:, 0].to(x.dtype)
        mixed = sum(seen[:, :, place : place + count] * taps[:, place] for place in range(width))
        return mixed.flatten(1, 2), seen[:, -1, count:]


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet as Qwen3.5 has it: one decay of a head, keys shared by groups of heads.

    Args:
      heads: of keys and of values.
      widths: of a key's head and of a value's.
      conv_width: taps of the convolution.

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
        """[B, T, C] -> [B, T, C]; with a cache the tokens follow those that it has seen."""
        projected, gate, write, rate = self._project(x)
        mixed, tail = self.conv1d(projected, None if cache is None else cache.tail)
        q, k, v = functional.silu(mixed).split(self.sizes, dim=-1)
        q, k = (scale_to_length_one(self._split(one, self.widths[0])) for one in (q, k))
        write = write.float().sigmoid()
        inputs = DeltaInputs(
            q=q * self.widths[0] ** -0.5, k=k, v=self._split(v, self.widths[1]),
            g=-self.A_log.float().exp() * functional.softplus(rate.float() + self.dt_bias.float()),
            erase=write, write=write,
        )  # fmt: skip
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
    """Gated DeltaNet as Qwen3-Next has it: two projections, packed by heads of keys."""

    def _create_projections(self, width: int) -> None:
        self.in_proj_qkvz = nn.Linear(width, sum(self.sizes) + self.sizes[2], bias=False)
        self.in_proj_ba = nn.Linear(width, 2 * self.heads[1], bias=False)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        keys, values = self.heads
        own = values // keys * self.widths[1]
        packed = self.in_proj_qkvz(x).unflatten(-1, (keys, -1))
        q, k, v, gate = packed.split([self.widths[0], self.widths[0], own, own], dim=-1)
        write, rate = self.in_proj_ba(x).unflatten(-1, (keys, -1)).chunk(2, dim=-1)
        mixed = torch.cat([one.flatten(2) for one in (q, k, v)], dim=-1)
        return mixed, gate.flatten(2), write.flatten(2), rate.flatten(2)


def draw_step_bias(count: int) -> Tensor:
    """What softplus makes of it are drawn steps, evenly of their logarithms."""
    steps = torch.empty(count).uniform_(*(math.log(one) for one in _STEPS)).exp()
    return steps + torch.log(-torch.expm1(-steps))


def run_rule(
    inputs: DeltaInputs | DplrInputs, tail: Tensor, cache: DeltaCache | None, options: CoreOptions
) -> Tensor:
    """Outputs [B, T, H, V] of a rule: chunks of a sequence or prompt, a step of decoding.

    Args:
      tail: the layer's last inputs, which a cache keeps beside the state.

    Raises:
      UserError: `model.args` asks for what cannot be, of these inputs or where they are.
    """
    if cache is None:
        _require_whole_chunks(inputs, options)
        return _run_tokens(inputs, None, options)[0]
    if inputs.q.shape[1] == 1:
        output, state = _run_step(inputs, cache.state, options)
    else:
        # Nobody chooses how long a prompt is.
        output, state = _run_tokens(inputs, cache.state, replace(options, pad=True))
    cache.keep(state, tail)
    return output


def _run_tokens(
    inputs: DeltaInputs | DplrInputs, state: Tensor | None, options: CoreOptions
) -> tuple[Tensor, Tensor]:
    """A sequence or a prompt, by the package that is asked for or a chunk at a time."""
    if options.backend == OWN:
        chunks = chunk_dplr if isinstance(inputs, DplrInputs) else chunk_delta_rule
        return chunks(inputs, state, options=options)
    require_gpu(options.backend, inputs.v)
    return run_backend(options.backend, inputs, state)


def _require_whole_chunks(inputs: DeltaInputs | DplrInputs, options: CoreOptions) -> None:
    """That own chunks of a sequence are full where none may be padded.

    Raises:
      UserError: they are not.
    """
    tokens, updates = inputs.q.shape[1], inputs.v.shape[1]
    if options.pad or options.backend != OWN or not updates % options.chunk:
        return
    size = f"{tokens}" if updates == tokens else f"{tokens}, of {updates // tokens} updates each"
    raise UserError(
        f"model.args.pad (False): data.sequence_length ({size}) is no multiple of model.args.chunk "
        f"({options.chunk}); change one of them"
    )


def _run_step(
    inputs: DeltaInputs | DplrInputs, state: Tensor | None, options: CoreOptions
) -> tuple[Tensor, Tensor]:
    """One token; kernels have no way back, so that where gradients are wanted there is none."""
    options = settle_step(options, inputs)
    if options.kernels == "pallas" and not torch.is_grad_enabled():
        require_kernels(inputs.v.device, inputs.v.dtype)
        return step_rule(inputs, state)
    step = recur_dplr if isinstance(inputs, DplrInputs) else recur_delta_rule
    return step(inputs, state)


def scale_to_unit(x: Tensor, eps: float) -> Tensor:
    """x over its root mean square."""
    return x * torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + eps)


def scale_to_length_one(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x over its length, in float32."""
    wide = x.float()
    return wide * torch.rsqrt((wide * wide).sum(dim=-1, keepdim=True) + eps)
