"""Optimizers on XLA: learning rates near zero in one graph, and Muon with timm's values."""

from __future__ import annotations

import logging

import pytest
import timm
import timm.optim.muon as timms
import torch
from torch import nn

import main
from models.patches.convolution import hold_as_hwio
from optim_factory import create_optimizer, create_schedule
from tests.support.tiny_parts import create_argv, create_cpu_runtime, create_xla_runtime
from utils.clipping import Clipping, clip_gradients
from utils.config.sections import OptimSection
from utils.runtime.graph_updates import (
    FACTOR_DECAYS,
    LEAST_PRODUCT,
    lower_muon,
    orthogonalise,
    raise_decays,
)

# What they are called in a configuration; adafactor and mars multiply by the decay itself.
NAMES = {
    "AdaBelief": "adabelief",
    "AdafactorBigVision": "adafactorbv",
    "Adan": "adan",
    "Lion": "lion",
    "SGDW": "sgdw",
}
# From nothing to a peak and back, as warm-ups and schedules go.
RATES = (0.0, 1e-12, 1e-9, 1e-6, 1e-3, 1e-2, 1e-7, 1e-12)


def create_convnet() -> nn.Module:
    return timm.create_model("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16))


def test_every_optimizer_with_multiplicative_decay_is_tested_here():
    assert set(NAMES) == set(FACTOR_DECAYS)


@pytest.mark.parametrize("name", [*NAMES.values(), "adafactor", "mars"])
def test_layer_decayed_learning_rates_are_as_configured(name):
    """Once they were raised to 6e-8 / weight_decay: 7 times the rate at this first step."""
    section = OptimSection(
        name=name, lr=1e-3, warmup_lr=1e-6, warmup_steps=4, weight_decay=0.05, layer_decay=0.7
    )
    optimizer = create_optimizer(section, create_convnet())
    schedule = create_schedule(section, total_steps=10, steps_per_epoch=5)
    lrs, decays = schedule.values(0, optimizer)
    scales = [group["lr_scale"] for group in optimizer.param_groups]
    assert min(scales) < 0.25
    assert lrs == pytest.approx([1e-6 * scale for scale in scales], rel=1e-12)
    runtime = create_cpu_runtime()
    runtime.updates.set_hyperparameters(optimizer, lrs, decays)
    for group, lr in zip(optimizer.param_groups, lrs, strict=True):
        assert group["lr"] == lr
        assert group["weight_decay"] == (0.05 if group["decays"] else 0.0)


@pytest.mark.xla
def test_on_xla_the_decay_is_raised_to_one_rounding_and_its_lr_is_not(caplog):
    section = OptimSection(name="lion", lr=1e-3, weight_decay=0.05)
    runtime, optimizer = create_xla_runtime(), create_optimizer(section, nn.Linear(3, 2))
    decays = [0.05 if group["decays"] else 0.0 for group in optimizer.param_groups]
    with caplog.at_level(logging.WARNING):
        for lr in (1e-3, 1e-9, 1e-12):
            runtime.updates.set_hyperparameters(optimizer, [lr, lr], decays)
            for group in optimizer.param_groups:
                assert group["lr"] == lr
                wanted = max(0.05, LEAST_PRODUCT / lr) if group["decays"] else 0.0
                assert group["weight_decay"] == pytest.approx(wanted)
    (record,) = caplog.records
    for words in ("Lion's 0.05 is raised to 60", "rate is 1e-09", "learning rates stay"):
        assert words in record.getMessage()


@pytest.mark.parametrize(
    ("name", "arguments", "wanted"),
    [
        ("adamw", {}, 0.05),
        ("lion", {"corrected_weight_decay": True}, LEAST_PRODUCT / (1e-5 * 1e-5 / 1e-3)),
        ("adafactorbv", {"unscaled_wd": True}, 0.05),
        ("adabelief", {"fixed_decay": True}, 0.05),
    ],
)
def test_a_decay_is_raised_by_its_optimizers_effective_factor(name, arguments, wanted):
    section = OptimSection(name=name, lr=1e-3, weight_decay=0.05, args=arguments)
    optimizer = create_optimizer(section, nn.Linear(3, 2, bias=False))
    assert raise_decays(optimizer, [1e-5], [0.05]) == pytest.approx([wanted])


def train(runtime, name: str) -> tuple[list[torch.Tensor], int]:
    """Weights after steps at `RATES`, and how many graphs the last of them compiled."""
    torch.manual_seed(0)
    model = runtime.prepare(nn.Linear(6, 4))
    section = OptimSection(name=name, lr=1e-2, weight_decay=0.05)
    optimizer = create_optimizer(
        section, model, device_arguments=runtime.updates.get_arguments(name)
    )
    runtime.updates.prepare(optimizer)
    inputs = runtime.tensor_to_device(torch.randn(8, 6, generator=torch.Generator().manual_seed(1)))
    schedule = create_schedule(section, total_steps=9, steps_per_epoch=9)
    counted = []
    for step, lr in enumerate(RATES):
        lrs = [max(lr, schedule.lr_floor) for _ in optimizer.param_groups]
        decays = [0.05 if group["decays"] else 0.0 for group in optimizer.param_groups]
        with runtime.step(0, step):
            rates = runtime.updates.set_hyperparameters(optimizer, lrs, decays)
            model(inputs).square().mean().backward()
            runtime.updates.apply(optimizer, rates)
        counted.append(runtime.counters()["graphs"])
    return [p.detach().cpu() for p in model.parameters()], counted[-1] - counted[1]


@pytest.mark.xla
@pytest.mark.parametrize("name", [*NAMES.values(), "adafactor", "mars"])
def test_learning_rates_that_reach_zero_take_one_graph_and_match_the_cpu(name):
    weights, graphs = train(create_xla_runtime(), name)
    assert graphs == 0
    for value, wanted in zip(weights, train(create_cpu_runtime(), name)[0], strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-4, atol=2e-5)  # of moves of 1e-2


@pytest.mark.parametrize(
    ("device", "code"), [("cpu", 0), pytest.param("xla", 2, marks=pytest.mark.xla)]
)
def test_later_starts_are_refused_only_if_a_decay_never_pauses(tmp_path, capsys, device, code):
    flags = ("--opt=lion", '--optim.unfreeze={"blocks.*":1}', "--run.check_only=true")
    assert main.main(create_argv(tmp_path, *flags, device=device)) == code
    assert ("on XLA lion's weight decay takes 6e-08" in capsys.readouterr().err) is (code == 2)


@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (5, 16, 16)])
@pytest.mark.parametrize(
    ("preset", "arguments"),
    [("quintic", {}), ("original", {"scale_eps": True}), ("polar_express", {"safety_factor": 1.1})],
)
def test_matrices_are_orthogonalised_like_timm(shape, preset, arguments):
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
def test_convolutions_in_another_layout_are_updated_like_timms(name):
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


def test_adaptive_clipping_uses_the_units_of_such_convolutions():
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
