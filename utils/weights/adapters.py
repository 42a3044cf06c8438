"""Merges tensors that exist only during training into the plain weights.

A low-rank adapter is three tensors beside the weights of a layer; the two linear layers of NORM lie
below the pooling layer, under the name of the classifier that they are merged into.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

DOWN, UP, SCALE = "lora_down", "lora_up", "lora_scale"
WIDENED = "norm_to_"  # begins the name of NORM's layers, before the classifier's
BATCH_NORM_EPS = 1e-5
T = TypeVar("T")


def is_adapter(name: str) -> bool:
    is_low_rank = name.rpartition(".")[2] in (DOWN, UP, SCALE)
    return is_low_rank or any(part.startswith(WIDENED) for part in name.split("."))


def drop_adapters(values: Mapping[str, T]) -> dict[str, T]:
    """Return the entries that remain once adapters are merged."""
    return {name: value for name, value in values.items() if not is_adapter(name)}


def merge_adapters(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Merge adapters into the weights, in float64."""
    merged = drop_adapters(tensors)
    for name, down in tensors.items():
        layer, _, kind = name.rpartition(".")
        if kind != DOWN:
            continue
        weight = merged[f"{layer}.weight"]
        product = tensors[f"{layer}.{UP}"].double() @ down.double()
        adapted = weight.double() + tensors[f"{layer}.{SCALE}"].double() * product
        merged[f"{layer}.weight"] = adapted.to(weight.dtype)
    for name in tensors:
        if WIDENED in name and name.endswith(".expand.0.weight"):
            _merge_widened(tensors, name.removesuffix(".expand.0.weight"), merged)
    return merged


def _merge_widened(tensors: Mapping[str, Tensor], path: str, merged: dict[str, Tensor]) -> None:
    """Merge NORM's layers into the classifier: all are linear at each position."""
    scales, shifts, weights = list[Tensor](), list[Tensor](), list[Tensor]()
    for layer in ("expand", "contract"):
        weight, bias, mean, variance = (
            tensors[f"{path}.{layer}.1.{part}"].double()
            for part in ("weight", "bias", "running_mean", "running_var")
        )
        scales.append(weight / (variance + BATCH_NORM_EPS).sqrt())
        shifts.append(bias - scales[-1] * mean)
        weights.append(tensors[f"{path}.{layer}.0.weight"].double().flatten(1))
    first, second = (scale[:, None] * weight for scale, weight in zip(scales, weights, strict=True))
    whole = second @ first + torch.eye(first.shape[1], dtype=first.dtype)
    rest = second @ shifts[0] + shifts[1]
    head = path.rpartition(f".{WIDENED}")[2].replace("/", ".")
    weight, bias = merged[f"{head}.weight"], merged[f"{head}.bias"]
    merged[f"{head}.bias"] = (bias.double() + weight.double() @ rest).to(bias.dtype)
    merged[f"{head}.weight"] = (weight.double() @ whole).to(weight.dtype)
