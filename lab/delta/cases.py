"""What is measured: a rule, its sizes, and how much work and traffic it needs at least.

Work is counted in two ways. The exact one counts the products of the chunked form; the convention
of training reports counts 8 K V of a token and head of values, three times for a training step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from models.delta.rules.inputs import DeltaInputs, DplrInputs
from utils.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from models.delta.rules.inputs import DeltaInputs, DplrInputs

MODES = ("forward", "both", "decode")
ATTENTION, RWKV = "attention", "rwkv7"
# Types of a rule's q and k, and of all other values; of attention all are the latter.
TYPES = {
    "bfloat16": ("bfloat16", "bfloat16"),
    "layers": ("float32", "bfloat16"),
    "float32": ("float32", "float32"),
}
_UNBOUNDED_DECAY = -0.606531


@dataclass(frozen=True)
class Rule:
    """A rule's inputs: whether gates, erase and write are of channels; updates of a token."""

    gates: bool = False
    erase: bool = False
    write: bool = False
    steps: int = 1


RULES = {
    "deltanet": Rule(),
    "gdn": Rule(),
    "kda": Rule(gates=True),
    "gdn2": Rule(gates=True, erase=True, write=True),
    "delta_product": Rule(steps=2),
}
VARIANTS = (*RULES, RWKV, ATTENTION)


@dataclass(frozen=True)
class LabCase:
    """One measurement."""

    variant: str
    mode: str
    # of q and k; `value_heads` of v. RWKV-7 has those of v alone; attention as many queries as
    # heads of v, and keys and values of `key_heads`
    key_heads: int
    value_heads: int
    batch: int
    # of a sequence; of a decoding step what attention's cache holds, and nothing of rules
    tokens: int
    width: int = 128  # of keys and of values
    chunk: int = 64

    @property
    def updates(self) -> int:
        """Of a token."""
        return RULES[self.variant].steps if self.variant in RULES else 1

    def count_flops(self) -> float:
        """Of the products that the form makes; attention: of the pairs that count."""
        width, chunk = self.width, self.chunk
        places = self.batch * self.value_heads * (1 if self.mode == "decode" else self.tokens)
        if self.variant == ATTENTION:
            seen = self.tokens if self.mode == "decode" else self.tokens / 2
            return 4.0 * places * seen * width * (3.5 if self.mode == "both" else 1.0)
        if self.mode == "decode":
            return 6.0 * places * width * width * self.updates
        if self.variant == RWKV:
            forward = 8 * width**2 + 18 * chunk * width
            backward = 20 * width**2 + 46 * chunk * width
        else:
            forward = 6 * width**2 + 10 * chunk * width + chunk**2 / 3
            backward = 16 * width**2 + 28 * chunk * width
        of_token = forward + (backward if self.mode == "both" else 0.0)
        return float(places * self.updates * of_token)

    def count_reported_flops(self) -> float:
        """8 K V of a token and head of values, three times with the backward pass."""
        tokens = 1 if self.mode == "decode" else self.tokens
        of_token = 8.0 * self.width**2 * self.value_heads * (3 if self.mode == "both" else 1)
        return self.batch * tokens * of_token

    def count_bytes(self) -> float:
        """Count bytes, read and written once: bfloat16 inputs and outputs, float32 gates, states.

        With the backward pass inputs are read twice, the output's gradient and the output once,
        and a gradient of each input is written.
        """
        states = self.batch * self.value_heads * self.width**2 * 4.0
        heads, width = self.value_heads, self.width
        if self.mode == "decode":
            cache = 4.0 * self.batch * self.tokens * self.key_heads * width
            return cache if self.variant == ATTENTION else 2 * states
        shared = heads if self.variant == RWKV else self.key_heads
        read = 2.0 * width * (shared * (1 + self.updates) + heads * self.updates)
        output = 2.0 * width * heads
        if self.variant == ATTENTION:
            read, gates = 2.0 * width * (heads + 2 * self.key_heads), 0.0
        elif self.variant == RWKV:
            read, gates = 2.0 * width * heads * 5, 4.0 * heads * width
        else:
            rule = RULES[self.variant]
            of_steps = [width if rule.erase else 1, width if rule.write else 0]
            gates = 4.0 * heads * ((width if rule.gates else 1) + sum(of_steps) * self.updates)
        times = (3, 2) if self.mode == "both" else (1, 1)
        return self.batch * self.tokens * ((read + gates) * times[0] + output * times[1])


def create_inputs(case: LabCase, dtype: torch.dtype, *, seed: int = 0) -> list[Tensor]:
    """Tensors of a rule, in the order of `bind`: unit keys, gates as layers make them.

    Gates and rates are float32, or float64 where the inputs are.
    """
    import torch
    from torch.nn.functional import normalize, softplus

    draw = torch.Generator().manual_seed(seed)
    wide = torch.promote_types(dtype, torch.float32)
    tokens = 1 if case.mode == "decode" and case.variant != ATTENTION else case.tokens
    count, heads, width = tokens * case.updates, case.value_heads, case.width

    def normal(*sizes: int) -> Tensor:
        return torch.randn((case.batch, *sizes), generator=draw, dtype=wide)

    if case.variant == ATTENTION:
        is_step = case.mode == "decode"
        # A step reads what a cache keeps of each head.
        keys = (case.key_heads, tokens) if is_step else (tokens, case.key_heads)
        sides = [(1 if is_step else tokens, heads), keys, keys]
        return [normal(*side, width).to(dtype) for side in sides]
    if case.variant == RWKV:
        key = normalize(normal(tokens, heads, width), dim=-1)
        rate, decay = (torch.sigmoid(normal(tokens, heads, width)) for _ in range(2))
        q, k, v = (normal(tokens, heads, width) * width**-0.5 for _ in range(3))
        moved = [q, k, v * width**0.5, -key, key * rate]
        q, k, v, a, b = (x.to(dtype) for x in moved)
        return [q, k, v, _UNBOUNDED_DECAY * decay, a, b]
    rule = RULES[case.variant]
    q = normalize(normal(tokens, case.key_heads, width), dim=-1) * width**-0.5
    k = normalize(normal(count, case.key_heads, width), dim=-1)
    g = -softplus(normal(tokens, heads, width) if rule.gates else normal(tokens, heads))
    g = g * (0.0 if case.variant == "deltanet" else 1.0)
    erase = torch.sigmoid(normal(count, heads, width) if rule.erase else normal(count, heads))
    inputs = [q.to(dtype), k.to(dtype), normal(count, heads, width).to(dtype), g, erase]
    return [*inputs, torch.sigmoid(normal(count, heads, width))] if rule.write else inputs


def create_typed(case: LabCase, types: str) -> list[Tensor]:
    """Create inputs of the types that a name in `TYPES` stands for."""
    import torch

    of_keys, of_values = (getattr(torch, name) for name in TYPES[types])
    inputs = create_inputs(case, of_values)
    count = 0 if case.variant in (ATTENTION, RWKV) else 2
    return [*(x.to(of_keys) for x in inputs[:count]), *inputs[count:]]


def bind(case: LabCase, tensors: list[Tensor]) -> DeltaInputs | DplrInputs:
    """Group tensors as the rule's inputs; without another one, write is erase."""
    if case.variant == RWKV:
        return DplrInputs(*tensors)
    q, k, v, g, erase, *write = tensors
    return DeltaInputs(q, k, v, g, erase, write[0] if write else erase, steps=case.updates)


def check_case(case: LabCase) -> None:
    """Refuse sizes that no rule has.

    Raises:
      UserError: names the flag.
    """
    if case.value_heads % case.key_heads:
        raise UserError(
            f"--heads ({case.key_heads}/{case.value_heads}): heads of q and k must divide those of "
            "v; change one"
        )
