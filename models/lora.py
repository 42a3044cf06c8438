"""Low-rank adapters of linear layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.freezing import freeze
from utils.errors import UserError
from utils.log import get_logger
from utils.patterns import check_patterns, matches
from utils.weights.adapters import DOWN, SCALE, UP, is_adapter
from utils.weights.fitting import list_head_names


class LowRankLinear(nn.Linear):
    """A linear layer whose weights are `weight + lora_scale * lora_up @ lora_down`.

    `weight` reads as the sum; names and shapes in the state stay.

    Source: Hu et al. 2021, arXiv:2106.09685, section 4.1.
    """

    _parameters: dict[str, nn.Parameter]
    lora_up: Tensor
    lora_down: Tensor
    lora_scale: Tensor

    @property
    # pyrefly: ignore[bad-override]  # a parameter of the base, a sum here
    def weight(self) -> Tensor:
        """[out, in], adapted."""
        return self._parameters["weight"] + self.lora_scale * (self.lora_up @ self.lora_down)

    def forward(self, input: Tensor) -> Tensor:
        """As `input @ weight.T + bias`, without a product of the size of `weight`."""
        outputs = functional.linear(input, self._parameters["weight"], self.bias)
        low = functional.linear(input, self.lora_down)
        return outputs + self.lora_scale * functional.linear(low, self.lora_up)

    def extra_repr(self) -> str:
        """Format the sides of the layer, and the rank."""
        return f"{super().extra_repr()}, rank={len(self.lora_down)}"

    def forget_adapter(self) -> None:
        """Turn this into the plain layer again, without the learnt part."""
        for name in (DOWN, UP, SCALE):
            delattr(self, name)
        plain: Any = nn.Linear
        self.__class__ = plain


def adapt(model: nn.Module, patterns: Sequence[str], rank: int, alpha: float) -> None:
    """Add adapters to linear layers, and freeze all else but the head.

    Initial values come from PyTorch's generator: `lora_down` is drawn as a linear layer's weights
    are, `lora_up` is zero.

    Args:
      patterns: of whole names of layers, such as `blocks.*.attn.qkv`.
      rank: columns of `lora_up`.
      alpha: the product is scaled by alpha / rank.

    Raises:
      UserError: a pattern matches no linear layer, or the head, which is trained whole, or the
        rank is no less than a side of a layer.
    """
    linear = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    heads = set(list_head_names(model))
    if not any(f"{name}.weight" not in heads for name in linear):
        raise UserError(
            f"model.lora ({list(patterns)}) adapts linear layers, and this model has "
            f"{', '.join(linear) or 'none'}{', the head, which is trained whole' * bool(linear)}; "
            "train it by optim.freeze or optim.lr_factors"
        )
    check_patterns("model.lora", patterns, linear)
    names = [name for name in linear if matches(name, patterns)]
    for name in names:
        if f"{name}.weight" in heads:
            raise UserError(
                f"model.lora ({list(patterns)}) matches {name}, the head, which is trained whole; "
                "leave it out"
            )
        side = min(linear[name].weight.shape)
        if rank >= side:
            raise UserError(
                f"model.lora_rank ({rank}) is no less than the smaller side of {name}, {side}, "
                "which would be cheaper to train whole; lower it"
            )
        _attach(linear[name], rank, alpha)
    own = [name for name, _ in model.named_parameters()]
    frozen = freeze(model, [name for name in own if name not in heads and not is_adapter(name)])
    text = "model.lora: %d layers have adapters of rank %d; %d numbers are frozen"
    get_logger().info(text, len(names), rank, frozen)


def _attach(layer: nn.Linear, rank: int, alpha: float) -> None:
    weight = layer.weight
    down = nn.Parameter(weight.new_empty(rank, layer.in_features))
    nn.init.kaiming_uniform_(down, a=math.sqrt(5))
    layer.register_parameter(DOWN, down)
    layer.register_parameter(UP, nn.Parameter(weight.new_zeros(layer.out_features, rank)))
    layer.register_buffer(SCALE, torch.tensor(alpha / rank, device=weight.device))
    layer.__class__ = LowRankLinear
