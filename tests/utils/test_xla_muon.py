"""Muon in plain products: timm's values, also for weights that lie in another order."""

from __future__ import annotations

import pytest
import timm.optim.muon as timms
import torch
from torch import nn

from models.patches.convolution import hold_as_hwio
from optim_factory import create_optimizer
from utils.clipping import Clipping, clip_gradients
from utils.config.sections import OptimSection
from utils.runtime.xla.muon import lower_muon, orthogonalise


@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (5, 16, 16)])
@pytest.mark.parametrize(
    ("preset", "arguments"),
    [("quintic", {}), ("original", {"scale_eps": True}), ("polar_express", {"safety_factor": 1.1})],
)
def test_matrices_are_made_orthogonal_as_timm_does(shape, preset, arguments):
    torch.manual_seed(0)
    matrices = torch.randn(shape, dtype=torch.float64)
    coefficients = timms._COEFFICIENTS[preset]
    for steps in (3, 7):
        ours = orthogonalise(matrices, steps, coefficients, **arguments)
        theirs = timms.zeropower_via_newtonschulz(
            matrices, steps, coefficients, dtype=torch.float64, **arguments
        )
        torch.testing.assert_close(ours, theirs)


def create_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(8, 16, 3), nn.Flatten(), nn.Linear(16, 12))


def get_updates(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """What two steps on the same gradients change, as files show it."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for seed in range(2):
        torch.manual_seed(seed)
        model.zero_grad()
        model(torch.randn(32, 8, 3, 3)).square().sum().backward()
        optimizer.step()
    return {name: value - before[name] for name, value in model.state_dict().items()}


@pytest.mark.parametrize("name", ["muon", "nadamuon"])
def test_a_convolution_that_lies_otherwise_moves_as_timm_moves_it(name):
    section = OptimSection(name=name, lr=0.01, weight_decay=0.1)
    plain, held = create_model(), create_model()
    hold_as_hwio(held[0])
    theirs = get_updates(plain, create_optimizer(section, plain))
    optimizer = create_optimizer(section, held)
    assert held[0]._parameters["weight"].shape == (3, 3, 8, 16)
    with lower_muon(optimizer):
        ours = get_updates(held, optimizer)
    assert optimizer.state[held[0]._parameters["weight"]]["use_muon"]
    for key, wanted in theirs.items():
        # Newton and Schulz iterate in bfloat16, and round at other places here.
        assert (ours[key] - wanted).norm() <= 0.05 * wanted.norm(), key
    assert timms.zeropower_via_newtonschulz is not orthogonalise  # nothing stays behind


def test_adaptive_clipping_knows_the_units_of_such_a_convolution():
    plain, held = create_model(), create_model()
    hold_as_hwio(held[0])
    create_optimizer(OptimSection(), held)
    for model in (plain, held):
        torch.manual_seed(3)
        model(torch.randn(32, 8, 3, 3)).square().sum().backward()
        before = model[0]._parameters["weight"].grad.clone()
        clip_gradients(list(model.parameters()), Clipping(ratio=0.5))
        assert not torch.equal(before, model[0]._parameters["weight"].grad)
    ours = held[0]._parameters["weight"].grad.permute(held[0].file_order)
    torch.testing.assert_close(ours, plain[0].weight.grad)
