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
from utils.config.metadata import check_devices
from utils.config.sections import ModelSection, OptimSection
from utils.config.train import TrainSection
from utils.endings import GraphBudgetError
from utils.errors import UserError
from utils.runtime.launcher import create_runtime
from utils.runtime.step_numbers import StepNumbers
from utils.runtime.tpu import standin
from utils.runtime.tpu.program import trace_step

pytestmark = pytest.mark.tpu

STEPS = 5
BARRIER = "tpu._optimization_barrier.default"
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
    before = standin.read_counts()
    for result in steps:
        wait()
        now = standin.read_counts()
        calls.append({name: now[name] - before[name] for name in now})
        values.append(runtime.fetch(result.values))
        before = standin.read_counts()
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
    assert runtime.counters() == {"graphs": 1, "host_reads": 0, "host_ops": 0}
    assert [step["programs"] for step in calls] == [1, 0, 0, 0, 0]
    assert [(step["executions"], step["transfers"]) for step in calls] == [(1, 0)] * STEPS
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


@pytest.mark.parametrize("compiles", [True, False])
def test_a_program_beyond_the_budget_is_refused_before_it_is_compiled(compiles):
    runtime = create_tpu_runtime(compile=compiles, graph_budget=1)
    batches = [*create_batches(3), *create_batches(2, size=6), *create_batches(2, size=5)]
    state = create_state(runtime, TinyConvNet(), ADAMW)
    steps = run_steps(state, batches, TinyTask(), runtime, create_plan(7, ADAMW, graph_budget=1))
    with pytest.raises(GraphBudgetError, match=r"needs a program .*runtime\.graph_budget \(1\)"):
        for result in steps:
            runtime.fetch(result.values)
    assert state.step == (3 if compiles else 6)  # a result is refused where it is read


def test_draws_of_a_program_are_those_of_operations():
    runtime = create_tpu_runtime(compile=True)
    batch, numbers = next(create_batches(1)), StepNumbers(step=torch.ones(1, device="tpu"))

    def draw(batch, numbers):
        images = torch.nn.functional.dropout(batch.images.float(), 0.5)
        return images * numbers.step, torch.rand(3, device="tpu")

    batch = runtime.to_device(batch)
    found = []
    for function in (draw, runtime.compile_step(draw, 8)):
        for step in (0, 1, 0):
            with runtime.step(1, step):
                found.append([value.cpu() for value in function(batch, numbers)])
    for one, other in ((0, 2), (0, 3), (1, 4), (2, 5)):
        assert all(map(torch.equal, found[one], found[other]))
    assert not torch.equal(found[0][1], found[1][1])


def test_a_block_that_is_recomputed_is_computed_twice_in_a_program():
    """The compiler sees a barrier before the second time, and merges nothing."""
    weight = torch.nn.Parameter(torch.full((4, 4), 0.1, device="tpu"))
    found = []
    for compiles in (False, True):
        runtime = create_tpu_runtime(compile=compiles)

        def differentiate(batch, numbers, runtime=runtime):
            hidden = batch.images.float().reshape(-1, 4) / 255
            for _ in range(2):
                hidden = runtime.checkpoint_block(lambda x: (x @ weight).exp().sin(), hidden)
            return torch.autograd.grad(hidden.sum(), weight)[0]

        batch = runtime.to_device(next(create_batches(1)))
        graph = trace_step(differentiate, batch, StepNumbers()).graph.graph
        names = [str(node.target) for node in graph.nodes]
        found.append((names.count("aten.exp.default"), names.count(BARRIER)))
        if compiles:
            gradient = runtime.compile_step(differentiate, 1)(batch, StepNumbers())
            torch.testing.assert_close(gradient, differentiate(batch, StepNumbers()))
    assert found == [(4, 0), (4, 2)]


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
        runtime.compile_step(lambda batch, numbers: numbers, 1)


def test_weights_of_a_single_process_are_not_split():
    with pytest.raises(UserError, match=r"parallel \('fsdp'\).*this run has one; set"):
        create_tpu_runtime(parallel="fsdp")


@pytest.mark.parametrize(
    "sections",
    [{"train": TrainSection(scan_layers=True)}, {"model": ModelSection(kernels="pallas")}],
    ids=["scan_layers", "kernels"],
)
def test_loops_and_kernels_of_xla_are_refused(sections):
    (prefix,) = sections
    with pytest.raises(UserError, match=rf"{prefix}\.\w+ \(.+\) works on xla, not on 'tpu'"):
        check_devices("tpu", **sections)


def test_the_stand_in_is_reported_as_the_cpu():
    runtime = create_tpu_runtime()
    assert runtime.describe()["hardware"] == "CPU"
    assert runtime.instruments.get_peak_gib() is None
    runtime.instruments.read_device()
    torch.ones(3, device="tpu").sin().cpu()
    assert runtime.instruments.read_device()["executions"] in (1, 2)


def test_a_plugin_with_another_hash_is_refused(monkeypatch):
    monkeypatch.setattr(standin, "_SHA256", "0" * 64)
    with pytest.raises(UserError, match=r"SHA-256 0{12}, got 0\.11\.2 with ad1309ac822b"):
        standin.find_plugin.__wrapped__()


@pytest.mark.parametrize("name", ["lion", "lamb", "adafactor"])
def test_an_optimizer_with_numbers_on_the_host_is_refused_in_a_program(name):
    section = OptimSection(name=name, lr=1e-3, warmup_steps=0)
    with pytest.raises(UserError, match="keeps its learning rate on the host"):
        train(create_tpu_runtime(compile=True), TinyConvNet(), section)


def test_a_weight_decay_that_changes_is_refused_in_a_program():
    section = ADAMW.model_copy(update={"name": "nadam", "weight_decay_end": 0.1})
    with pytest.raises(UserError, match=r"NAdam .*remove optim\.weight_decay_end"):
        train(create_tpu_runtime(compile=True), TinyConvNet(), section)


@pytest.mark.parametrize(
    "changes",
    [
        *({"name": name, "lr": 0.1} for name in ("sgd", "momentum")),
        *({"name": name, "weight_decay_end": 90.0} for name in ("adamw", "cadamw", "nadamw")),
    ],
    ids=lambda changes: changes["name"],
)
def test_rates_of_sgd_and_a_decay_that_changes_are_data_of_a_program(changes):
    section = ADAMW.model_copy(update=changes)
    runtime = create_tpu_runtime(compile=True)
    torch.manual_seed(0)
    wanted, _, _ = train(create_cpu_runtime(), TinyConvNet(), section)
    torch.manual_seed(0)
    values, calls, _ = train(runtime, TinyConvNet(), section)
    torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-6)
    # The first may be there already: the same program serves another decay.
    assert [step["programs"] for step in calls[1:]] == [0] * 4
    assert [step["executions"] for step in calls] == [1] * 5


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
