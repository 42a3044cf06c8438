"""The loop: what happens in which order. Knows no device, model, loss or dataset by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from tasks.counting import compute_ece, count_agreement, count_batch
from utils.log import get_logger
from utils.metrics import LoopMeter

if TYPE_CHECKING:
    from datasets import Batch
    from optim_factory import Schedule
    from utils.runtime.base import Runtime


_NOT_FINITE = (
    "the weights or running statistics hold NaN, or the answers overflow; lower optim.lr, or look "
    "at runtime.precision"
)


class Objective(Protocol):
    """Model and micro-batch -> an output with `total` (scalar) and `terms` (scalars by name)."""

    def __call__(self, model: nn.Module, batch: Batch) -> Any: ...


@dataclass
class TrainState:
    """What a run has become: a checkpoint holds it, all but what the configuration says again.

    That is the schedule and how a step is made: `ema_decay`, `accumulate_steps`, `max_grad_norm`.
    `first_bad_step` is scratch: no checkpoint is written where it is set.

    Args:
      model: the student.
      extra: trainable and stateful modules of the losses; may be empty.
      step: optimizer steps done.
      best_metric: best evaluation so far, top-1 in percent.
      input_processes: that the data position counts on; 0: any number may go on from it.
      scaler: of the loss, where the runtime computes in float16.
      skipped_steps: whose batches are drawn and dropped, because they spoilt the run once.
      first_bad_step: on the device: first step with a non-finite loss or gradient, else -1.
    """

    model: nn.Module
    extra: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    ema: nn.Module | None = None
    ema_decay: float = 0.0
    accumulate_steps: int = 1
    max_grad_norm: float | None = None
    step: int = 0
    best_metric: float = -1.0
    input_processes: int = 0
    scaler: torch.amp.GradScaler | None = None
    skipped_steps: tuple[int, ...] = ()
    first_bad_step: Tensor | None = None

    @property
    def eval_model(self) -> nn.Module:
        """The weights that are evaluated and exported: the average where there is one."""
        return self.model if self.ema is None else self.ema

    def parameters(self) -> list[nn.Parameter]:
        """All that is trained: the student's parameters and the losses' projections."""
        return [*self.model.parameters(), *self.extra.parameters()]

    def get_replicated(self) -> dict[str, Tensor]:
        """What must be the same on every rank: weights, average and projections."""
        found = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        found |= {f"extra.{k}": v for k, v in self.extra.named_parameters()}
        if self.ema is not None:
            found |= {f"ema.{k}": v for k, v in self.ema.state_dict().items()}
        return found


@dataclass
class Plan:
    """When things happen, in optimizer steps."""

    total_steps: int
    steps_per_epoch: int
    log_every: int
    eval_every: int
    checkpoint_every: int
    seed: int
    graph_budget: int


@dataclass
class Hooks:
    """What the loop calls: composition decides what is behind it.

    Args:
      batches: step -> batches from that step on, on the host.
      evaluate: state -> metrics by name, `top1` among them.
      write: step, metrics of a log point or an evaluation -> written and shown.
      save: state, whether it is the best so far -> checkpoint.
      begin_step: step that is about to begin: a trace may start or end.
      should_stop: steps done -> whether to save and end here; alike on all ranks.
      roll_back: state, bad step -> whether the state went back to before that step.
      global_batch_size: examples of one optimizer step over all ranks.
    """

    batches: Callable[[int], Iterable[Batch]]
    evaluate: Callable[[TrainState], dict[str, float]]
    write: Callable[[int, dict[str, float]], None]
    save: Callable[[TrainState, bool], None]
    global_batch_size: int
    begin_step: Callable[[int], None] = lambda step: None
    should_stop: Callable[[int], bool] = lambda step: False
    roll_back: Callable[[TrainState, int], bool] = lambda state, step: False


class NonFiniteError(RuntimeError):
    """A loss or gradient was not finite.

    Attributes:
      step: the first such step.
    """

    def __init__(self, step: int) -> None:
        super().__init__(
            f"the loss or gradient of step {step} was not finite; lower optim.lr, set "
            "optim.max_grad_norm, look at that batch, or skip it by train.on_nonfinite=rollback"
        )
        self.step = step


class NonFiniteEvaluationError(RuntimeError):
    """A model that is evaluated, exported or taught by answers with numbers that are not finite."""


class PreemptedError(RuntimeError):
    """The run was asked to end and has saved its state.

    Attributes:
      step: steps done.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"asked to end; step {step} is saved")
        self.step = step


def create_ema(model: nn.Module) -> nn.Module:
    """A copy of a model that averages its weights; never trained, in eval mode."""
    return deepcopy(model).requires_grad_(False).eval()


def get_ema_decay(decay: float, step: int) -> float:
    """The decay at a step: a short run's average forgets its start, (1 + step) / (10 + step)."""
    return min(decay, (1.0 + step) / (10.0 + step))


@torch.no_grad()
def update_ema(ema: nn.Module, model: nn.Module, weight: Tensor) -> None:
    """ema += weight * (model - ema), for parameters and float buffers.

    Integer buffers (BatchNorm's count of batches) are copied.

    Args:
      weight: 1 - decay, a scalar on the device. A Python number would be merged with any equal
        number of the graph, such as 1 - beta1, and cost another graph when the two meet.
    """
    pairs = list(zip(ema.state_dict().values(), model.state_dict().values(), strict=True))
    moving = [(mine, theirs) for mine, theirs in pairs if mine.is_floating_point()]
    if moving:
        averages, values = (list(side) for side in zip(*moving, strict=True))
        differences = torch._foreach_sub(values, averages)
        torch._foreach_mul_(differences, weight)
        torch._foreach_add_(averages, differences)
    for mine, theirs in pairs:
        if not mine.is_floating_point():
            mine.copy_(theirs)


def train_step(
    state: TrainState, batch: Batch, objective: Objective, runtime: Runtime
) -> dict[str, Tensor]:
    """Run one optimizer step; the returned scalars stay on the device."""
    totals: dict[str, Tensor] = {}
    for micro_batch in runtime.split(batch, state.accumulate_steps):
        with runtime.autocast():
            loss = objective(state.model, micro_batch)
        runtime.backward(loss.total / state.accumulate_steps, last=micro_batch.is_last)
        for name, value in loss.terms.items():
            totals[name] = totals.get(name, 0.0) + value / state.accumulate_steps
    runtime.ranks.reduce_gradients(state.optimizer)
    runtime.unscale(state.optimizer)
    grad_norm = _clip_gradients(state.parameters(), state.max_grad_norm)
    runtime.optimizer_step(state.optimizer)
    if state.ema is not None:
        weight = runtime.upload([1.0 - get_ema_decay(state.ema_decay, state.step)])[0]
        update_ema(state.ema, state.model, weight)
    return {**totals, "grad_norm": grad_norm}


def _clip_gradients(parameters: list[nn.Parameter], limit: float | None) -> Tensor:
    """Scale all gradients to a global norm of at most `limit`; gives the norm before."""
    if limit is None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        return get_total_norm(gradients, foreach=False)
    return clip_grad_norm_(parameters, limit, foreach=False)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    predict: Callable[[nn.Module, Batch], Tensor],
    runtime: Runtime,
) -> dict[str, float]:
    """Accuracy, cross-entropy and calibration over every valid example once, for any split.

    Args:
      batches: host batches of one static shape, the last one padded and masked.
      predict: model, device batch -> logits [B, K].

    Returns:
      `top1` and `top5` in percent, `loss` in nats and `ece` (0 to 1), over all examples of all
      ranks; `examples` counted.
    """
    was_training = model.training
    model.eval()
    sums = _sum_batches(lambda batch: count_batch(predict(model, batch), batch), batches, runtime)
    model.train(was_training)
    top1, top5, loss, examples = sums[:4].tolist()
    share = 1.0 / max(examples, 1.0)
    return {
        "top1": 100.0 * top1 * share,
        "top5": 100.0 * top5 * share,
        "loss": loss * share,
        "ece": compute_ece(sums[4:]),
        "examples": examples,
    }


def is_finite(metrics: Mapping[str, float]) -> bool:
    """Whether all answers that were evaluated were finite numbers."""
    return math.isfinite(metrics.get("loss", 0.0))


@torch.no_grad()
def compute_agreement(
    predict: Callable[[Batch], Tensor],
    predict_other: Callable[[Batch], Tensor],
    batches: Iterable[Batch],
    runtime: Runtime,
) -> float:
    """Percent of valid examples for which two models name the same class."""

    def count(batch: Batch) -> Tensor:
        return count_agreement(predict(batch), predict_other(batch), batch.mask)

    same, examples = _sum_batches(count, batches, runtime).tolist()
    return 100.0 * same / max(examples, 1.0)


def _sum_batches(
    count: Callable[[Batch], Tensor], batches: Iterable[Batch], runtime: Runtime
) -> Tensor:
    """Sum of `count` over all batches of all ranks, on the host. # host read: one in all"""
    sums = None
    with runtime.prefetch(batches) as feeder:
        for batch in feeder:
            with runtime.autocast():
                counted = count(batch)
            if sums is None:
                # Uploaded zeros are data: every batch is the same graph.
                sums = runtime.upload([0.0] * counted.numel())
            sums = counted + sums
            runtime.finish_step()
    return runtime.fetch(runtime.ranks.sum(sums))


def fit(
    state: TrainState, plan: Plan, hooks: Hooks, objective: Objective, runtime: Runtime
) -> dict[str, float]:
    """Train from `state.step` to the plan's end.

    The order: [batch -> step -> log -> checkpoint -> evaluate]* -> final checkpoint -> barrier.
    A restored state that stands on an evaluation's step is evaluated first: the run may have
    ended between the two.

    Returns:
      The metrics of the last evaluation.

    Raises:
      PreemptedError: the run was asked to end; its state is saved.
      NonFiniteError: a loss or gradient was not finite, and the run does not go back.
      NonFiniteEvaluationError: the last evaluation was not finite; nothing is saved of it.
    """
    _clear_bad_step(state, runtime)  # before the meter: its graph is no step's
    runtime.ranks.check_replicas(state.get_replicated(), "at the start")
    meter = LoopMeter(runtime, plan.graph_budget, plan.steps_per_epoch)
    while True:
        try:
            metrics = _run_steps(state, plan, hooks, objective, runtime=runtime, meter=meter)
            break
        except NonFiniteError as error:
            if not hooks.roll_back(state, error.step):
                raise
    if not is_finite(metrics):
        raise NonFiniteEvaluationError(
            f"the evaluation after step {state.step} was not finite: {_NOT_FINITE}"
        )
    _save(state, hooks, runtime)
    runtime.ranks.check_replicas(state.get_replicated(), "at the end")
    runtime.ranks.barrier("end of training")
    return metrics


def _run_steps(
    state: TrainState,
    plan: Plan,
    hooks: Hooks,
    objective: Objective,
    *,
    runtime: Runtime,
    meter: LoopMeter,
) -> dict[str, float]:
    """All steps that are left, with what happens between them; the last evaluation's metrics."""
    _clear_bad_step(state, runtime)
    metrics: dict[str, float] = {}
    if state.step and (state.step % plan.eval_every == 0 or state.step >= plan.total_steps):
        metrics = _evaluate(state, meter, hooks, runtime)
    with runtime.prefetch(hooks.batches(state.step)) as feeder:
        state.model.train()
        state.extra.train()
        while state.step < plan.total_steps:
            hooks.begin_step(state.step)
            with runtime.span("input"):
                batch = next(feeder)
            scalars = None
            if state.step not in state.skipped_steps:
                with runtime.span("step"):
                    scalars = _run_step(state, batch, objective, runtime, plan.seed)
            state.step += 1
            meter.end_step(state.step, hooks.global_batch_size, feeder.wait_s)
            runtime.flush_deferred()
            is_end = state.step == plan.total_steps
            if state.step % plan.log_every == 0 or is_end:
                _log(state, scalars, meter, hooks, runtime)
            if state.step % plan.checkpoint_every == 0 and not is_end:
                runtime.flush_deferred()
                _save(state, hooks, runtime)
            if not is_end and hooks.should_stop(state.step):
                runtime.flush_deferred()
                _save(state, hooks, runtime)
                raise PreemptedError(state.step)
            if state.step % plan.eval_every == 0 or is_end:
                runtime.flush_deferred()
                metrics = _evaluate(state, meter, hooks, runtime)
    return metrics


def _clear_bad_step(state: TrainState, runtime: Runtime) -> None:
    state.first_bad_step = runtime.upload([-1.0])[0]
    runtime.finish_step()


def _run_step(
    state: TrainState, batch: Batch, objective: Objective, runtime: Runtime, seed: int
) -> tuple[tuple[str, ...], Tensor]:
    """One step between seeding and dispatch: names and values of its scalars, on the device."""
    with runtime.step(seed, state.step):
        lrs, decays = state.schedule.values(state.step, state.optimizer)
        runtime.set_hyperparameters(state.optimizer, lrs, decays)
        scalars = train_step(state, batch, objective, runtime)
        # One vector, made in every step: the same graph whether or not it is read.
        vector = torch.stack([value.detach().float().reshape(()) for value in scalars.values()])
        vector = runtime.ranks.mean(vector)
        step = runtime.upload([float(state.step)])[0]
        # A scaled loss overflows now and then; its gradients are then dropped, not used.
        watched = vector if state.scaler is None else vector[:-1]
        is_new = (state.first_bad_step < 0) & ~torch.isfinite(watched).all()
        state.first_bad_step = torch.where(is_new, step, state.first_bad_step)
        vector = torch.cat([vector, state.first_bad_step.reshape(1)])
    return (*scalars, "first_bad_step"), vector


def _log(
    state: TrainState,
    scalars: tuple[tuple[str, ...], Tensor] | None,
    meter: LoopMeter,
    hooks: Hooks,
    runtime: Runtime,
) -> None:
    """Hand a log line over; its values are read one step behind the device.

    A skipped step has no values: its line says nothing of the loss.
    """
    facts = {"lr": state.schedule.lr_at(state.step - 1), **meter.take(state.step)}
    if scalars is None:
        hooks.write(state.step, facts)
        return
    names, vector = scalars

    def write(step: int, host: Tensor) -> None:
        values = dict(zip(names, host.tolist(), strict=True))
        bad_step = int(values.pop("first_bad_step"))
        hooks.write(step, {**values, **facts})
        if bad_step >= 0:
            raise NonFiniteError(bad_step)

    runtime.defer(write, state.step, scalars=vector)


def _evaluate(
    state: TrainState, meter: LoopMeter, hooks: Hooks, runtime: Runtime
) -> dict[str, float]:
    _average_buffers(state, runtime)
    with runtime.span("evaluation"), meter.phase("eval", state.step):
        runtime.ranks.check_replicas(state.get_replicated(), f"after step {state.step}")
        metrics = hooks.evaluate(state)
    state.model.train()
    if not is_finite(metrics):
        get_logger().warning(
            "the evaluation after step %d was not finite: %s", state.step, _NOT_FINITE
        )
    elif metrics["top1"] > state.best_metric:
        _require_finite(state, runtime)
        state.best_metric = metrics["top1"]
        hooks.save(state, True)
    line = {f"eval_{name}": value for name, value in metrics.items()}
    hooks.write(state.step, {**line, **meter.get_graphs()})
    return metrics


def _save(state: TrainState, hooks: Hooks, runtime: Runtime) -> None:
    _require_finite(state, runtime)
    _average_buffers(state, runtime)
    with runtime.span("checkpoint"):
        hooks.save(state, False)


def _require_finite(state: TrainState, runtime: Runtime) -> None:
    """Refuse to save what came of a bad step. # host read: checkpoints only"""
    bad_step = int(runtime.fetch(state.first_bad_step))
    if bad_step >= 0:
        raise NonFiniteError(bad_step)


def _average_buffers(state: TrainState, runtime: Runtime) -> None:
    """BatchNorm's running statistics are of each rank's examples: evaluate and save their mean."""
    for model in (state.model, state.ema):
        if model is not None:
            runtime.ranks.average_buffers(model)
