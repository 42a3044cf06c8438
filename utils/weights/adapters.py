"""Low-rank adapters as they stand in a state: three tensors beside the weights of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor

DOWN, UP, SCALE = "lora_down", "lora_up", "lora_scale"
T = TypeVar("T")


def is_adapter(name: str) -> bool:
    """Whether a tensor of that name belongs to an adapter."""
    return name.rpartition(".")[2] in (DOWN, UP, SCALE)


def drop_adapters(values: Mapping[str, T]) -> dict[str, T]:
    """What is left once adapters have been merged, by name."""
    return {name: value for name, value in values.items() if not is_adapter(name)}


def merge_adapters(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state whose adapters have become part of the weights, added in float64."""
    found = drop_adapters(tensors)
    for name, down in tensors.items():
        layer, _, kind = name.rpartition(".")
        if kind != DOWN:
            continue
        weight = found[f"{layer}.weight"]
        product = tensors[f"{layer}.{UP}"].double() @ down.double()
        adapted = weight.double() + tensors[f"{layer}.{SCALE}"].double() * product
        found[f"{layer}.weight"] = adapted.to(weight.dtype)
    return found
