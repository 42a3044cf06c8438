"""On XLA: no graph after the first step, no read, no operator on the host."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from losses.weighted import WeightedLoss
from tests.losses.examples import (
    NAMES,
    NO_GRADIENT,
    create_example_loss,
    create_inputs,
    map_examples,
)

pytestmark = pytest.mark.xla

# Those of one graph; several teachers make inputs of their own.
ALONE = [name for name in NAMES if not name.startswith("multi_")]
FAMILIES = [
    *(tuple(ALONE[start : start + 10]) for start in range(0, len(ALONE), 10)),
    tuple(name for name in NAMES if name not in ALONE),
]


def move(inputs, device, factor):
    """The inputs times a factor, on a device, the student's leaves anew."""

    def place(x):
        if not x.is_floating_point():
            return x.to(device)
        return (factor * x.detach()).to(device).requires_grad_(x.requires_grad)

    return map_examples(inputs, place)


@pytest.mark.parametrize("names", FAMILIES, ids=lambda names: names[0])
def test_later_steps_compile_nothing_and_read_nothing(names):
    torch_xla = pytest.importorskip("torch_xla")
    metrics = pytest.importorskip("torch_xla.debug.metrics")
    device = torch_xla.device()
    weights = [0.0 if name in NO_GRADIENT else 1.0 for name in names]
    losses = [create_example_loss(name) for name in names]
    weighted = WeightedLoss(list(zip(names, losses, weights, strict=True))).to(device)
    inputs = replace(create_inputs(names[0]), mask=torch.tensor([True, True, True, False]))
    values = []
    torch_xla.sync()
    for step in range(4):
        if step == 1:
            torch_xla.sync(wait=True)
            metrics.clear_all()
        weighted.zero_grad(set_to_none=True)
        moved = move(inputs, device, 1.0 + step / 8)
        total = weighted(moved).total
        total.backward()
        values.append(total.detach())
        torch_xla.sync(wait=True)
    assert not metrics.counter_value("UncachedCompile")
    assert metrics.metric_data("TransferFromDeviceTime") is None
    assert [name for name in metrics.counter_names() if name.startswith("aten::")] == []
    assert torch.stack(values).cpu().isfinite().all()
