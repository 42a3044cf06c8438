"""The loop: order of operations, exact sums, clipping, averages and loud failure."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from datasets import Batch
from engine import (
    Callbacks,
    NonFiniteError,
    evaluate,
    fit,
    train_step,
    upload_numbers,
)
from losses.base import LossOutput
from tests.support.tiny_parts import (
    CLASSES,
    DEVICE_CASES,
    RUNTIMES,
    TinyConvNet,
    TinyTask,
    create_batch,
    create_batches,
    create_cpu_runtime,
    create_plan,
    create_state,
    create_vit,
    create_xla_runtime,
    predict,
)
from utils.clipping import Clipping
from utils.config.execution import RuntimeSection
from utils.config.sections import OptimSection
from utils.ema import create_ema
from utils.endings import GraphBudgetError
from utils.metrics import Evaluation, LoopMeter
from utils.runtime.cpu import CpuRuntime
from utils.runtime.processes.ranks import Alone
from utils.runtime.step_numbers import StepNumbers

SGD = OptimSection(
    name="momentum", lr=1.0, min_lr=1.0, schedule="constant", weight_decay=0.0, momentum=0.0
)
ADAMW = OptimSection(lr=1e-2, min_lr=1e-4, warmup_steps=2, warmup_lr=0.0, max_grad_norm=1.0)


class LoopCallbacks(Callbacks):
    """Callbacks of which a test gives what it looks at."""

    def __init__(self, batches, lines: list | None = None, **given) -> None:
        written = [] if lines is None else lines
        evaluate = given.pop("evaluate", lambda state: {"top1": 0.0})
        self.get_batches = batches
        self.evaluate = lambda state: judge(evaluate(state))
        self.write = lambda step, kind, scalars: written.append((step, scalars))
        for name, function in given.items():
            setattr(self, name, function)


def judge(metrics: dict[str, float]) -> Evaluation:
    return Evaluation(metrics, metrics["top1"])


class TwoRanks(Alone):
    """Rank 0 of two, whose gradients are averaged with those of a second rank."""

    def __init__(self, other: torch.Tensor) -> None:
        super().__init__()
        self.other = other

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = (parameter.grad + self.other) / 2


def test_gradients_are_clipped_after_the_mean_over_ranks():
    """Gradients (3, 0) and (0, 4) with limit 1 give (0.6, 0.8), not the (0.5, 0.5) of clipping
    before the mean."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    runtime = create_cpu_runtime()
    runtime.ranks = TwoRanks(torch.tensor([[0.0, 4.0]]))
    state = create_state(runtime, model, SGD)
    own = torch.tensor([[3.0, 0.0]])

    def loss(network, batch):
        return LossOutput((network.weight * own).sum(), {})

    plan = create_plan(1, SGD, clipping=Clipping(norm=1.0))
    scalars = train_step(
        state, create_batch(2), TinyTask(loss), runtime, plan, upload_numbers(state, plan, runtime)
    )
    torch.testing.assert_close(model.weight.detach(), torch.tensor([[-0.6, -0.8]]))
    assert float(scalars["grad_norm"]) == pytest.approx(2.5)


def test_a_gradient_below_the_limit_is_unchanged():
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    runtime = create_cpu_runtime()
    state = create_state(runtime, model, SGD)

    def loss(network, batch):
        return LossOutput((network.weight * torch.tensor([[3.0, 4.0]])).sum(), {})

    plan = create_plan(1, SGD, clipping=Clipping(norm=10.0))
    scalars = train_step(
        state, create_batch(2), TinyTask(loss), runtime, plan, upload_numbers(state, plan, runtime)
    )
    torch.testing.assert_close(model.weight.detach(), torch.tensor([[-3.0, -4.0]]))
    assert float(scalars["grad_norm"]) == pytest.approx(5.0)


@pytest.mark.parametrize("device", DEVICE_CASES)
def test_ema_equals_a_float64_reference_over_30_steps(device):
    """Parameters and BatchNorm's float buffers are averaged; its integer count is copied.

    The decay rises to its value as (1 + step) / (10 + step), which it reaches at step 80: steps
    60 to 90 see both sides.
    """
    torch.manual_seed(0)
    runtime, decay, steps = RUNTIMES[device](), 0.9, 30
    state = create_state(runtime, TinyConvNet(), ADAMW, ema=True)
    plan = create_plan(steps, ADAMW, ema_decay=decay)
    names = list(state.model.state_dict())
    reference = {n: v.cpu().double().numpy() for n, v in state.model.state_dict().items()}
    task = TinyTask()
    for step in range(steps):
        lrs, decays = plan.schedule.values(step, state.optimizer)
        rates = runtime.updates.set_hyperparameters(state.optimizer, lrs, decays)
        batch = create_batch(seed=step).map(runtime.tensor_to_device)
        weights = runtime.upload(plan.averaging.get_weights(60 + step))
        train_step(state, batch, task, runtime, plan, StepNumbers(rates, weights))
        runtime.finish_step()
        now = {n: v.cpu().double().numpy() for n, v in state.model.state_dict().items()}
        keep = min(decay, (61 + step) / (70 + step))
        for name in names:
            reference[name] = keep * reference[name] + (1 - keep) * now[name]
    average = {n: v.cpu() for n, v in state.ema.state_dict().items()}
    count = "norm.num_batches_tracked"
    assert average.pop(count).item() == state.model.state_dict()[count].item() == steps
    moved = 0.0
    for name, value in average.items():
        np.testing.assert_allclose(value.double().numpy(), reference[name], rtol=2e-5, atol=1e-6)
        moved = max(moved, float((value - state.model.state_dict()[name].cpu()).abs().max()))
    assert moved > 1e-2
    assert not any(p.requires_grad for p in state.ema.parameters())
    assert not state.ema.training


@pytest.mark.parametrize("device", DEVICE_CASES)
def test_evaluation_is_exact_where_the_batch_does_not_divide_the_split(device):
    """37 examples in batches of 16: against plain numpy over all of them at once."""
    runtime = RUNTIMES[device]()
    model = create_vit(seed=3)
    batches = [create_batch(16, 0), create_batch(16, 1), create_batch(16, 2, valid=5)]
    # What stands on padding must not count, whatever it is.
    batches[2].images[5:] = 255
    with torch.no_grad():
        logits = torch.cat([predict(model.eval(), batch) for batch in batches]).double().numpy()
    mask = torch.cat([batch.mask for batch in batches]).numpy()
    labels = torch.cat([batch.labels for batch in batches]).numpy()[mask]
    logits = logits[mask]
    order = np.argsort(-logits, axis=1)
    own = logits[np.arange(37), labels]
    loss = np.mean(np.log(np.exp(logits).sum(axis=1)) - own)
    model.train()
    found = evaluate(runtime.prepare(model), batches, TinyTask(), runtime).metrics
    assert found["examples"] == 37
    assert found["top1"] == pytest.approx(100 * np.mean(order[:, 0] == labels), rel=1e-6)
    top5 = 100 * np.mean((order[:, :5] == labels[:, None]).any(axis=1))
    assert found["top5"] == pytest.approx(top5, rel=1e-6)
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    assert model.training


def test_tied_logits_do_not_count_as_correct():
    class Constant(nn.Module):
        def forward(self, images):
            return torch.zeros(len(images), CLASSES)

    found = evaluate(Constant(), [create_batch(16)], TinyTask(), create_cpu_runtime()).metrics
    assert found["top1"] == found["top5"] == 0.0


@pytest.mark.xla
def test_evaluation_gives_no_gradient_and_reads_the_device_once():
    runtime = create_xla_runtime()
    model = runtime.prepare(create_vit(seed=4, embed_dim=18))
    before = runtime.counters()
    evaluate(model, list(create_batches(5)), TinyTask(), runtime)
    after = runtime.counters()
    assert after["host_reads"] == before["host_reads"]
    assert after["host_ops"] == before["host_ops"]
    assert after["graphs"] - before["graphs"] <= 3
    assert all(p.grad is None for p in model.parameters())


def test_accumulating_four_micro_batches_equals_the_undivided_batch():
    runtime, model = create_cpu_runtime(), create_vit()
    batch, task = create_batch(16), TinyTask()
    results = []
    for parts in (1, 4):
        state = create_state(runtime, copy.deepcopy(model), SGD, ema=True)
        plan = create_plan(8, SGD, accumulate_steps=parts, ema_decay=0.5)
        scalars = train_step(
            state, batch, task, runtime, plan, upload_numbers(state, plan, runtime)
        )
        results.append((state, scalars))
    (whole, whole_scalars), (divided, divided_scalars) = results
    start = dict(model.named_parameters())
    for name, value in whole.model.named_parameters():
        change = (value - start[name]).detach()
        other = (dict(divided.model.named_parameters())[name] - start[name]).detach()
        assert float((change - other).norm()) <= 1e-5 * float(change.norm()) + 1e-9, name
    for name, value in whole_scalars.items():
        assert float(divided_scalars[name]) == pytest.approx(float(value), rel=1e-5), name


def test_terms_are_the_means_of_the_micro_batches():
    values = iter([1.0, 2.0, 6.0, 7.0])

    def loss(network, batch):
        value = torch.tensor(next(values))
        return LossOutput(network.weight.sum(), {"kd": value, "twice": 2 * value})

    runtime = create_cpu_runtime()
    state = create_state(runtime, nn.Linear(2, 1), SGD)
    plan = create_plan(1, SGD, accumulate_steps=4)
    scalars = train_step(
        state, create_batch(8), TinyTask(loss), runtime, plan, upload_numbers(state, plan, runtime)
    )
    assert (float(scalars["loss/kd"]), float(scalars["loss/twice"])) == (4.0, 8.0)


def test_the_last_micro_batch_is_marked():
    runtime, told = create_cpu_runtime(), []
    state = create_state(runtime, create_vit(), SGD)
    backward = runtime.backward

    def record(loss, *, last):
        told.append(last)
        backward(loss, last=last)

    runtime.backward = record
    plan = create_plan(1, SGD, accumulate_steps=4)
    train_step(
        state, create_batch(16), TinyTask(), runtime, plan, upload_numbers(state, plan, runtime)
    )
    assert told == [False, False, False, True]


def test_fit_keeps_its_order_of_operations():
    """[batch -> step -> log -> checkpoint -> evaluate]* -> final checkpoint -> barrier."""
    calls: list[str] = []
    runtime = create_cpu_runtime()
    state = create_state(runtime, TinyConvNet(), SGD)
    task = TinyTask()

    def counted(model, batch):
        calls.append(f"step {state.step}")
        return task.loss(model, batch)

    def batches(first: int) -> Iterator[Batch]:
        assert first == 0
        yield from create_batches(6)

    runtime.ranks.barrier = lambda name: calls.append(f"barrier: {name}")
    callbacks = LoopCallbacks(
        batches,
        evaluate=lambda s: calls.append(f"evaluate {s.step}") or {"top1": float(-s.step)},
        write=lambda step, kind, scalars: calls.append(f"write {kind} {step}"),
        save=lambda s, best: calls.append(f"save{' best' if best else ''} {s.step}"),
    )
    plan = create_plan(6, SGD, log_every=2, checkpoint_every=2, eval_every=4)
    evaluation = fit(state, plan, callbacks, TinyTask(counted), runtime)
    assert evaluation == judge({"top1": -6.0})
    # A log line is read one step behind the device, and before a checkpoint or an evaluation.
    assert calls == [
        "step 0",
        "step 1",
        "write train 2",
        "save 2",
        "step 2",
        "step 3",
        "write train 4",
        "save 4",
        "evaluate 4",
        "save best 4",
        "write eval 4",
        "step 4",
        "step 5",
        "write train 6",
        "evaluate 6",
        "write eval 6",
        "save 6",
        "barrier: end of training",
    ]


def test_the_meter_counts_the_examples_of_each_step(monkeypatch):
    told = []
    monkeypatch.setattr(LoopMeter, "end_step", lambda meter, *facts: told.append(facts))
    runtime = create_cpu_runtime()
    state = create_state(runtime, TinyConvNet(), SGD)
    callbacks = LoopCallbacks(lambda first: create_batches(3, size=8))
    fit(state, create_plan(3, SGD, global_batch_size=32), callbacks, TinyTask(), runtime)
    assert [facts[:2] for facts in told] == [(1, 32), (2, 32), (3, 32)]
    assert all(0.0 <= waited < 32 for *_, waited in told)


def test_an_evaluation_leaves_the_model_in_training_mode():
    modes, task = [], TinyTask()

    def watched(model, batch):
        modes.append(model.training)
        return task.loss(model, batch)

    runtime = create_cpu_runtime()
    state = create_state(runtime, TinyConvNet(), SGD)
    callbacks = LoopCallbacks(
        lambda first: create_batches(3), evaluate=lambda s: s.model.eval() and {"top1": 0.0}
    )
    fit(state, create_plan(3, SGD, eval_every=1), callbacks, TinyTask(watched), runtime)
    assert modes == [True, True, True]


def test_the_best_evaluation_so_far_is_saved_as_such():
    """The older one of two equals stays the best."""
    saved, scores = [], iter([10.0, 30.0, 30.0, 20.0])
    runtime = create_cpu_runtime()
    callbacks = LoopCallbacks(
        lambda step: create_batches(8),
        evaluate=lambda state: {"top1": next(scores)},
        save=lambda state, best: saved.append((state.step, best)),
    )
    plan = create_plan(8, SGD, eval_every=2, checkpoint_every=100)
    state = create_state(runtime, TinyConvNet(), SGD)
    fit(state, plan, callbacks, TinyTask(), runtime)
    assert saved == [(2, True), (4, True), (8, False)]
    assert state.best_score == 30.0


def test_a_state_restored_at_an_evaluations_step_is_evaluated_first():
    seen = []
    runtime = create_cpu_runtime()
    callbacks = LoopCallbacks(
        lambda step: seen.append(f"batches from {step}") or create_batches(6),
        evaluate=lambda state: seen.append(f"evaluate {state.step}") or {"top1": 0.0},
    )
    state = create_state(runtime, TinyConvNet(), SGD)
    state.step = 4
    fit(state, create_plan(6, SGD, eval_every=4), callbacks, TinyTask(), runtime)
    assert seen == ["evaluate 4", "batches from 4", "evaluate 6"]


def test_a_finished_run_of_any_length_is_evaluated_when_it_is_continued():
    """Five steps with evaluations at 2 and 4: the end's own may have been lost."""
    runtime = create_cpu_runtime()
    callbacks = LoopCallbacks(lambda step: iter(()), evaluate=lambda state: {"top1": 7.0})
    state = create_state(runtime, TinyConvNet(), SGD)
    state.step = 5
    evaluation = fit(state, create_plan(5, SGD, eval_every=2), callbacks, TinyTask(), runtime)
    assert evaluation == judge({"top1": 7.0})


def test_a_scaled_gradient_that_overflows_drops_its_step_and_no_more():
    """float16: batch 1 has a finite loss and, scaled, an infinite gradient."""
    runtime = CpuRuntime(RuntimeSection(device="cpu", precision="fp16"))
    model, factors = nn.Linear(1, 1, bias=False), iter([1.0, 1e35, 1.0])
    nn.init.zeros_(model.weight)
    lines: list = []

    def loss(network, batch):
        return LossOutput((network.weight * next(factors)).sum(), {})

    state = create_state(runtime, model, SGD)
    state.scaler = runtime.updates.scaler
    callbacks = LoopCallbacks(lambda step: create_batches(3), lines)
    fit(state, create_plan(3, SGD), callbacks, TinyTask(loss), runtime)
    assert model.weight.item() == pytest.approx(-2.0)
    norms = [line["grad_norm"] for _, line in lines if "grad_norm" in line]
    assert norms == [1.0, float("inf"), 1.0]


def test_an_evaluation_after_a_bad_step_makes_no_best_checkpoint():
    """Step 3 is bad, nothing is logged until step 9: the evaluation after 4 must find it."""
    saved, scores = [], iter([10.0, 20.0, 30.0])
    runtime = create_cpu_runtime()
    losses = iter([1.0, 1.0, 1.0, float("nan"), 1.0])

    def loss(network, batch):
        return LossOutput((network.weight * next(losses)).sum(), {})

    callbacks = LoopCallbacks(
        lambda step: create_batches(9),
        evaluate=lambda state: {"top1": next(scores)},
        save=lambda state, best: saved.append((state.step, best)),
    )
    state = create_state(runtime, nn.Linear(1, 1), SGD)
    plan = create_plan(9, SGD, log_every=9, eval_every=2, checkpoint_every=100)
    with pytest.raises(NonFiniteError, match="step 3 was not finite"):
        fit(state, plan, callbacks, TinyTask(loss), runtime)
    assert saved == [(2, True)]


def test_an_error_of_the_loader_reaches_the_loop_with_its_cause():
    def batches(step: int) -> Iterator[Batch]:
        yield from create_batches(2)
        try:
            raise OSError("the disk is gone")
        except OSError as error:
            raise RuntimeError("cannot read batch 2") from error

    lines: list = []
    runtime = create_cpu_runtime()
    state = create_state(runtime, TinyConvNet(), SGD)
    with pytest.raises(RuntimeError, match="cannot read batch 2") as caught:
        fit(state, create_plan(6, SGD), LoopCallbacks(batches, lines), TinyTask(), runtime)
    assert isinstance(caught.value.__cause__, OSError)
    assert state.step == 2


def test_a_loader_that_ends_early_raises_an_error():
    runtime = create_cpu_runtime()
    state = create_state(runtime, TinyConvNet(), SGD)
    callbacks = LoopCallbacks(lambda step: create_batches(3))
    with pytest.raises(RuntimeError, match="the batches ended at step 3 of 6"):
        fit(state, create_plan(6, SGD), callbacks, TinyTask(), runtime)


@pytest.mark.parametrize("device", DEVICE_CASES)
@pytest.mark.parametrize(("checkpoint_every", "logged"), [(1, []), (100, [5])])
def test_a_non_finite_loss_stops_the_run_and_names_the_step(device, checkpoint_every, logged):
    """Step 3 is bad; the next log point or checkpoint stops, and no checkpoint holds what came."""
    runtime, saved, lines = RUNTIMES[device](), [], []
    task = TinyTask()

    def poisoned(model, batch):
        loss = task.loss(model, batch)
        bad = (batch.indices[0] == -7).float()
        return SimpleNamespace(total=loss.total / (1.0 - bad), terms=loss.terms)

    def batches(step: int) -> Iterator[Batch]:
        for number, batch in enumerate(create_batches(10)):
            if number == 3:
                batch.indices.fill_(-7)
            yield batch

    callbacks = LoopCallbacks(batches, lines, save=lambda state, best: saved.append(state.step))
    slow = SGD.model_copy(update={"lr": 0.1})
    state = create_state(runtime, TinyConvNet(6), slow)
    plan = create_plan(10, slow, log_every=5, checkpoint_every=checkpoint_every)
    with pytest.raises(NonFiniteError, match="step 3 was not finite"):
        fit(state, plan, callbacks, TinyTask(poisoned), runtime)
    assert [step for step, _ in lines] == logged
    assert saved == ([1, 2, 3] if checkpoint_every == 1 else [])


@pytest.mark.xla
def test_a_run_that_exceeds_its_graph_budget_ends_and_names_the_step():
    """The third batch has another size: a graph more than the earlier run has compiled."""
    runtime = create_xla_runtime()

    def run(sizes: tuple[int, ...], more_graphs: int) -> None:
        state = create_state(runtime, TinyConvNet(5), SGD)
        runtime.finish_step()
        budget = runtime.counters()["graphs"] + more_graphs
        callbacks = LoopCallbacks(lambda step: (create_batch(size) for size in sizes))
        plan = create_plan(len(sizes), SGD, graph_budget=budget)
        fit(state, plan, callbacks, TinyTask(), runtime)

    run((12, 12), more_graphs=4)
    with pytest.raises(GraphBudgetError, match=r"^train of step 3 compiled graph .*graph_budget"):
        run((12, 12, 14, 12), more_graphs=0)


def test_the_average_starts_as_a_copy_and_shares_nothing():
    model = TinyConvNet()
    ema = create_ema(model)
    for mine, theirs in zip(ema.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.data_ptr() != theirs.data_ptr()
