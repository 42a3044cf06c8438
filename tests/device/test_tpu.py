"""TorchTPU's device `tpu`, on its stand-in where there is no TPU: programs, executions, values."""

from __future__ import annotations

import pytest
import torch

from engine import run_steps
from tests.support.tiny_parts import (
    TinyConvNet,
    TinyTask,
    create_batches,
    create_cpu_runtime,
    create_plan,
    create_state,
    create_vit,
)
from utils.config.execution import RuntimeSection
from utils.config.sections import OptimSection
from utils.errors import UserError
from utils.runtime.launcher import create_runtime
from utils.runtime.tpu import standin

pytestmark = pytest.mark.tpu

STEPS = 5
ADAMW = OptimSection(name="adamw", lr=1e-3, weight_decay=0.05, warmup_lr=1e-5, warmup_steps=2)


def train(runtime, model, section=ADAMW, task=None, **plan):
    """Return the values of each step, and the driver's calls in each of them."""
    torch.manual_seed(0)
    state = create_state(runtime, model, section, ema=True)
    plan = create_plan(STEPS, section, **plan)
    steps = run_steps(state, create_batches(STEPS), task or TinyTask(), runtime, plan)
    values, calls = [], []
    wait = torch.accelerator.synchronize if runtime.name == "tpu" else int
    wait()
    before = dict(standin.COUNTS)
    for result in steps:
        wait()
        now = dict(standin.COUNTS)
        calls.append({name: now[name] - before.get(name, 0) for name in now})
        values.append(runtime.fetch(result.values))
        before = dict(standin.COUNTS)
    return torch.stack(values), calls, state


def create_tpu_runtime(**section):
    return create_runtime(RuntimeSection(device="tpu", **section))


@pytest.mark.parametrize("model", [create_vit, TinyConvNet])
def test_a_compiled_step_is_one_program_and_one_execution(model):
    runtime = create_tpu_runtime(compile=True)
    torch.manual_seed(0)
    wanted, _, _ = train(create_cpu_runtime(), model(), ema_decay=0.9, accumulate_steps=2)
    torch.manual_seed(0)
    values, calls, state = train(runtime, model(), ema_decay=0.9, accumulate_steps=2)
    torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-6)
    # The second one takes a scalar from the first vector that is uploaded.
    assert 1 <= runtime.counters()["graphs"] <= 2
    for step in calls[1:]:
        assert step == {"programs": 0, "executions": 1, "transfers": 0}
    assert all(parameter.grad is None for parameter in state.model.parameters())


def test_operations_of_a_step_compile_nothing_after_the_first_steps():
    runtime = create_tpu_runtime()
    torch.manual_seed(0)
    wanted, _, _ = train(create_cpu_runtime(), create_vit(), ema_decay=0.9)
    torch.manual_seed(0)
    values, calls, _ = train(runtime, create_vit(), ema_decay=0.9)
    torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-6)
    assert [step["programs"] for step in calls[2:]] == [0, 0, 0]
    assert [step["transfers"] for step in calls] == [0] * STEPS
    assert runtime.counters() == {"graphs": 0, "host_reads": 0, "host_ops": 0}


def test_a_seed_gives_the_same_numbers_again():
    runtime = create_tpu_runtime()
    drawn = []
    for seed, step in ((1, 0), (1, 0), (1, 1)):
        with runtime.step(seed, step):
            drawn.append(torch.rand(4, device=runtime.device).cpu())
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_several_processes_on_the_stand_in_compile_no_step(monkeypatch):
    runtime = create_tpu_runtime(compile=True)
    monkeypatch.setattr(runtime.ranks, "size", 2)
    with pytest.raises(UserError, match="whose sums leave the device"):
        runtime.compile_step(lambda batch, numbers: numbers)


def test_the_stand_in_is_reported_as_the_cpu():
    runtime = create_tpu_runtime()
    assert runtime.describe()["hardware"] == "CPU"
    assert runtime.instruments.read_device() == {}


def test_a_plugin_with_another_hash_is_refused(monkeypatch):
    monkeypatch.setattr(standin, "_SHA256", "0" * 64)
    with pytest.raises(UserError, match=r"SHA-256 0{12}, got 0\.11\.2 with ad1309ac822b"):
        standin.find_plugin.__wrapped__()


@pytest.mark.parametrize("name", ["sgd", "lion", "lamb", "adafactor"])
def test_an_optimizer_with_numbers_on_the_host_is_refused_in_a_program(name):
    section = OptimSection(name=name, lr=1e-3, warmup_steps=0)
    with pytest.raises(UserError, match="keeps its learning rate on the host"):
        train(create_tpu_runtime(compile=True), TinyConvNet(), section)


def test_a_weight_decay_that_changes_is_refused_in_a_program():
    section = ADAMW.model_copy(update={"weight_decay_end": 0.1})
    with pytest.raises(UserError, match=r"remove optim\.weight_decay_end"):
        train(create_tpu_runtime(compile=True), TinyConvNet(), section)


@pytest.mark.parametrize(
    "changes", [{"name": "sgd"}, {"name": "lamb"}, {"weight_decay_end": 0.1}], ids=str
)
def test_numbers_on_the_host_are_data_of_operations(changes):
    section = ADAMW.model_copy(update=changes)
    runtime = create_tpu_runtime()
    torch.manual_seed(0)
    wanted, _, _ = train(create_cpu_runtime(), TinyConvNet(), section)
    torch.manual_seed(0)
    values, _, _ = train(runtime, TinyConvNet(), section)
    torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-6)
    assert runtime.counters()["graphs"] == 0
