"""Optimizers by name: their arguments, prepared states and graphs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine import Callbacks, fit
from optim_factory import PREPARABLE, PROVEN, check_optimizer_name, create_optimizer
from tests.support.tiny_parts import (
    TinyConvNet,
    TinyTask,
    create_batches,
    create_cpu_runtime,
    create_plan,
    create_state,
    create_vit,
    create_xla_runtime,
)
from tests.test_optim_factory import BASE, create_groups
from utils.config.sections import OptimSection
from utils.errors import UserError


def test_an_unknown_optimizer_is_refused_with_a_similar_name():
    with pytest.raises(UserError, match=r"optim.name 'adamww'.*did you mean 'adamw'"):
        check_optimizer_name("adamww")


@pytest.mark.parametrize("name", ["kron", "lookahead"])
def test_an_unsupported_optimizer_is_refused_with_its_reason(name):
    with pytest.raises(UserError, match="is refused: it"):
        check_optimizer_name(name)


def test_an_untested_optimizer_warns(caplog):
    check_optimizer_name("nadam")
    assert "nadam is not proven on XLA" in caplog.text
    caplog.clear()
    for name in PROVEN:
        check_optimizer_name(name)
    assert caplog.text == ""


def take_steps(count: int, **changes: object) -> list[float]:
    """Values of a weight of 1 after each step with a gradient of 1, 0.5, 0.25 ..."""
    weight = nn.Linear(1, 1, bias=False)
    nn.init.ones_(weight.weight)
    section = BASE.model_copy(update={"lr": 0.1, "weight_decay": 0.0, **changes})
    optimizer, found = create_optimizer(section, weight), []
    for number in range(count):
        weight.weight.grad = torch.full((1, 1), 0.5**number)
        optimizer.step()
        found.append(weight.weight.item())
    return found


def test_momentum_is_set_as_configured():
    """Heavy ball: v = momentum * v + g."""
    first, second = take_steps(2, name="momentum", momentum=0.3)
    assert first == pytest.approx(1 - 0.1)
    assert second == pytest.approx(first - 0.1 * (0.3 * 1 + 0.5))


def test_betas_are_set_as_configured():
    """Adam's second step by hand, with both moments corrected for their start."""
    first, second = take_steps(2, name="adamw", betas=(0.5, 0.9), eps=1e-12)
    moment = (0.5 * 0.5 * 1 + 0.5 * 0.5) / (1 - 0.5**2)
    square = (0.9 * 0.1 * 1 + 0.1 * 0.25) / (1 - 0.9**2)
    assert first == pytest.approx(0.9)
    assert second == pytest.approx(first - 0.1 * moment / square**0.5)


def test_eps_is_set_as_configured():
    """Adam's first step is lr * g / (|g| + eps)."""
    assert take_steps(1, name="adamw", eps=1.0) == pytest.approx([1 - 0.1 / 2])


def test_unsupported_optimizer_arguments_are_refused():
    with pytest.raises(UserError, match=r"optim.name 'adamw' refuses its arguments"):
        create_groups(create_vit(), args={"no_such_thing": 1})


@pytest.mark.parametrize("name", PREPARABLE)
def test_prepared_state_gives_the_same_bits_as_lazy_state(name):
    runtime = create_cpu_runtime()
    section = BASE.model_copy(update={"name": name, "momentum": 0.9, "lr": 0.01})
    models = [nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 6)) for _ in "ab"]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [create_optimizer(section, model) for model in models]
    runtime.updates.prepare(optimizers[1])
    generator = torch.Generator().manual_seed(1)
    start = [p.detach().clone() for p in models[0].parameters()]
    for step in range(5):
        gradients = [torch.randn(p.shape, generator=generator) for p in models[0].parameters()]
        for model, optimizer in zip(models, optimizers, strict=True):
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient.clone()
            runtime.updates.apply(optimizer)
        for lazy, prepared in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(lazy, prepared), f"step {step}"
    moved = [not torch.equal(a, b) for a, b in zip(start, models[0].parameters(), strict=True)]
    assert all(moved)


@pytest.mark.parametrize("name", PREPARABLE)
def test_preparing_the_state_does_not_change_parameters(name):
    runtime, model = create_cpu_runtime(), create_vit()
    before = [p.detach().clone() for p in model.parameters()]
    section = BASE.model_copy(update={"name": name, "lr": 1.0})
    runtime.updates.prepare(create_optimizer(section, model))
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, new)
        assert new.grad is None


# Their first step holds a number that is special there alone: Adafactor's beta2 is 0, and LAMB's
# bias correction equals another of its numbers. That is one more graph, at step 0.
SPECIAL_FIRST_STEP = ("lamb", "adafactor")


# One of each kind of step in every run of the suite, their relatives in the long one.
RELATIVES = ("muon", "nmuon", "adamuon", "cadamw", "cnadamw", "adamc", "nadamc")


@pytest.mark.xla
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in RELATIVES else n for n in PROVEN]
)
def test_a_proven_optimizer_compiles_nothing_after_its_first_steps_and_reads_nothing(name):
    """Eight steps whose warm-up starts at a learning rate of 0 and whose schedule ends at 0."""
    runtime, steps, lines = create_xla_runtime(), 8, []
    section = OptimSection(
        name=name,
        lr=1e-2,
        min_lr=0.0,
        warmup_lr=0.0,
        warmup_steps=3,
        schedule="linear",
        weight_decay=0.05,
        weight_decay_end=0.2,
        max_grad_norm=1.0,
    )
    torch.manual_seed(0)
    model = TinyConvNet(7)
    start = model.conv.weight.detach().clone()
    state = create_state(runtime, model, section, ema=True)
    budget = runtime.counters()["graphs"] + 8
    plan = create_plan(steps, section, log_every=2, ema_decay=0.9, graph_budget=budget)

    class Logs(Callbacks):
        def get_batches(self, step: int):
            return create_batches(steps)

        def write(self, step: int, kind: str, scalars: dict[str, float]) -> None:
            if kind == "train":
                lines.append(scalars)

    before = runtime.counters()
    fit(state, plan, Logs(), TinyTask(), runtime)
    after = runtime.counters()
    logs = lines
    assert len(logs) == steps // 2
    assert logs[-1]["graphs_train"] <= 1 + (name in SPECIAL_FIRST_STEP)
    assert logs[-1]["graphs_train"] == logs[0]["graphs_train"]
    assert [line["host_reads"] for line in logs] == [0] * len(logs)
    assert after["host_reads"] == before["host_reads"]
    assert after["host_ops"] == before["host_ops"]
    assert not torch.equal(start, state.model.conv.weight.detach().cpu())
