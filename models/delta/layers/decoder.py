"""One decoder for all delta rules: the same blocks, in which only the rule differs.

It is for comparing rules; it has no counterpart on the Hub.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.delta.layers.gated import (
    AnyCache,
    DeltaCache,
    GatedRmsNorm,
    ShortConvolution,
    draw_step_bias,
    run_rule,
    scale_to_length_one,
)
from models.delta.layers.kimi import ForgetGate
from models.delta.layers.qwen import GroupedShape, Qwen, QwenAttention, QwenMlp
from models.delta.layers.shapes import count_delta_flops
from models.delta.rules.inputs import DeltaInputs
from models.transformer import RmsNorm
from utils.errors import UserError, get_hint
from utils.json_types import JsonValue
from utils.weights.meaning import Meaning

LINEAR, LINEAR_ELU, PRODUCT = "linear", "linear_elu", "delta_product"
# Rule -> what decays: nothing, a head, or each of its channels.
DECAYS = {
    LINEAR: "",
    LINEAR_ELU: "",
    "delta_net": "",
    "gated_delta_net": "head",
    "kda": "channel",
    "gdn2": "channel",
    PRODUCT: "head",
}
_ADDING = (LINEAR, LINEAR_ELU)  # nothing is erased
_RATES = (1.0, 16.0)


@dataclass(frozen=True)
class RuleShape(GroupedShape):
    """The arguments of a decoder of one rule."""

    rule: str = "gated_delta_net"  # a name in `DECAYS`
    linear_heads: int = 4  # of the rule, each of linear_width channels of keys and of values
    linear_width: int = 64
    updates: int = 2  # of a token, by delta_product

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule not in DECAYS:
            raise UserError(
                f"model.args.rule ({self.rule!r}) is unknown; {get_hint(self.rule, DECAYS)}"
            )

    @property
    def steps(self) -> int:
        """Updates of a token."""
        return self.updates if self.rule == PRODUCT else 1

    def count_rule_flops(self) -> float:
        size = self.linear_width
        return count_delta_flops(self.linear_heads * self.steps, size, size, self.chunk)

    def list_meanings(self) -> dict[str, Meaning]:
        """List the rule, too: names and shapes show its gates and updates, but not its features."""
        meanings = {"rope_base": Meaning(self.rope_base, self.name_layers("mix", full=True))}
        if linear := self.name_layers("mix", full=False):
            meanings["rule"] = Meaning(self.rule, linear, self.rule == LINEAR_ELU)
        return meanings


class HeadGate(nn.Module):
    """Logarithms of the decay of each head: -e^A_log softplus(x + dt_bias).

    Source: Yang et al. 2024, arXiv:2412.06464, with the first values of its code.
    """

    def __init__(self, shape: RuleShape) -> None:
        super().__init__()
        self.a_proj = nn.Linear(shape.width, shape.linear_heads, bias=False)
        self.dt_bias = nn.Parameter(draw_step_bias(shape.linear_heads))
        self.A_log = nn.Parameter(torch.empty(shape.linear_heads).uniform_(*_RATES).log())

    def forward(self, x: Tensor) -> Tensor:
        """Return float32 [B, T, H], at most 0."""
        rate = functional.softplus(self.a_proj(x).float() + self.dt_bias.float())
        return -self.A_log.float().exp() * rate


class RuleAttention(nn.Module):
    """Short convolution, a rule, a gated norm: as in Gated DeltaNet but for the rule's gates."""

    def __init__(self, shape: RuleShape) -> None:
        super().__init__()
        self.shape, self.options = shape, shape.get_options()
        width, size = shape.width, shape.linear_heads * shape.linear_width
        self.sizes = (size, shape.steps * size, shape.steps * size)
        self.in_proj_qkv = nn.Linear(width, sum(self.sizes), bias=False)
        self.conv1d = ShortConvolution(sum(self.sizes), shape.conv_width)
        self.in_proj_z = nn.Linear(width, size, bias=False)
        decays = DECAYS[shape.rule]
        self.decay = {"head": HeadGate, "channel": ForgetGate}[decays](shape) if decays else None
        if shape.rule not in _ADDING:
            # GDN-2 erases channels of keys and writes those of values, all others a head as one.
            count = 2 * size if shape.rule == "gdn2" else shape.steps * shape.linear_heads
            self.in_proj_b = nn.Linear(width, count, bias=False)
        self.norm = GatedRmsNorm(shape.linear_width)
        self.out_proj = nn.Linear(size, width, bias=False)

    def forward(self, x: Tensor, cache: DeltaCache | None = None) -> Tensor:
        """[B, T, C] -> [B, T, C]; with a cache the tokens follow those of earlier calls."""
        shape = self.shape
        mixed, tail = self.conv1d(self.in_proj_qkv(x), None if cache is None else cache.tail)
        q, k, v = (self._split(x) for x in functional.silu(mixed).split(self.sizes, dim=-1))
        erase, write = self._create_gates(x)
        g = q.new_zeros(q.shape[:3]) if self.decay is None else self.decay(x)
        q, k = self._map_features(q, k)
        inputs = DeltaInputs(q=q, k=k, v=v, g=g, erase=erase, write=write, steps=shape.steps)
        output = run_rule(inputs, tail, cache, self.options)
        gate = self._split(self.in_proj_z(x))
        return self.out_proj(self.norm(output.to(x.dtype), gate).flatten(2))

    def _map_features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Scale queries and keys to length one; for linear_elu elu(x) + 1.

        Source: Katharopoulos et al. 2020, arXiv:2006.16236; its division by the sum of weights is
        a factor of a token and head, which the norm behind the rule removes.
        """
        if self.shape.rule == LINEAR_ELU:
            return functional.elu(q) + 1, functional.elu(k) + 1
        return scale_to_length_one(q) * self.shape.linear_width**-0.5, scale_to_length_one(k)

    def _create_gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute erase and write: [B, T n, H], or of each channel."""
        if self.shape.rule in _ADDING:
            zeros = torch.zeros(*x.shape[:2], self.shape.linear_heads, device=x.device)
            return zeros, torch.ones_like(zeros)
        gates = self.in_proj_b(x).float().sigmoid()
        if self.shape.rule == "gdn2":
            erase, write = gates.chunk(2, dim=-1)
            return self._split(erase), self._split(write)
        gates = gates.unflatten(-1, (-1, self.shape.linear_heads)).flatten(1, 2)
        return gates, gates

    def _split(self, x: Tensor) -> Tensor:
        """[B, T, n H D] -> [B, T n, H, D]."""
        size = (-1, self.shape.linear_heads, self.shape.linear_width)
        return x.unflatten(-1, size).flatten(1, 2)


class RuleBlock(nn.Module):
    """A rule or full attention, and SwiGLU, each behind a norm and added to its input."""

    def __init__(self, shape: RuleShape, layer: int) -> None:
        super().__init__()
        self.is_full = shape.is_full(layer)
        self.mix = QwenAttention(shape) if self.is_full else RuleAttention(shape)
        self.mlp = QwenMlp(shape.width, shape.mlp_width)
        self.mix_norm, self.mlp_norm = RmsNorm(shape.width), RmsNorm(shape.width)

    def forward(self, x: Tensor, cache: AnyCache | None = None) -> Tensor:
        x = x + self.mix(self.mix_norm(x), cache)
        return x + self.mlp(self.mlp_norm(x))


def create_rules(vocab_size: int, sequence_length: int, **shape: JsonValue) -> Qwen:
    """Create a decoder of one rule; `shape`: fields of `RuleShape`.

    Weights begin in proportion to 1 / sqrt(inputs), as narrow models need, and projections that add
    to the residual stream are scaled down by their number.
    """
    sizes = RuleShape.parse(shape)
    model = Qwen(vocab_size, sequence_length, sizes, block=RuleBlock)
    for name, module in model.model.layers.named_modules():
        if isinstance(module, nn.Linear):
            adds = name.endswith(("out_proj", "o_proj", "down_proj"))
            scale = (2 * sizes.depth) ** -0.5 if adds else 1.0
            nn.init.normal_(module.weight, std=scale * module.in_features**-0.5)
    return model
