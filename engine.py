"""The training loop and its order of operations. It names no device, model, loss or dataset."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from store.record.catalogue import EVAL, LOSS, TRAIN
from utils.clipping import Clipping, clip_gradients
from utils.ema import Averaging, update_averages
from utils.endings import (
    EarlyStop,
    NonFiniteError,
    NonFiniteEvaluationError,
    PreemptedError,
    Stagnation,
)
from utils.log import get_logger
from utils.metrics import Evaluation, LoopMeter
from utils.runtime.step_numbers import StepNumbers

if TYPE_CHECKING:
    from datasets import Batch
    from optim_factory import Schedule
    from utils.runtime.base import Runtime

T = TypeVar("T")
BatchT = TypeVar("BatchT", bound="Batch")
BatchT_contra = TypeVar("BatchT_contra", bound="Batch", contravariant=True)


class TaskLoss(Protocol):
    """Loss of one micro-batch.

    Attributes:
      total: scalar on the device, the start of the backward pass.
      terms: detached scalars by name, for the log.
    """

    @property
    def total(self) -> Tensor: ...

    @property
    def terms(self) -> Mapping[str, Tensor]: ...


class Task(Protocol[BatchT_contra]):
    """A training task: the loss of a batch, and the metrics of an evaluation from its sums."""

    @property
    def unit(self) -> tuple[str, int]:
        """Unit of throughput, such as tokens, and how many of them one example has."""

    def loss(self, model: nn.Module, batch: BatchT_contra) -> TaskLoss:
        """Compute the loss of a micro-batch on the device."""

    def count(self, model: nn.Module, batch: BatchT_contra) -> Tensor:
        """Return float32 [C] on the device: sums over valid examples of an evaluation's batch."""

    def summarise(self, sums: Tensor) -> Evaluation:
        """Compute the evaluation from the sums over all batches and ranks, on the host."""


@dataclass
class TrainState:
    """State of a run: exactly what a checkpoint holds.

    Args:
      loss_modules: trainable and stateful modules of the losses; may be empty.
      averages: moving averages of the student's weights, by name of their part of a checkpoint.
      head: the student's parameters that `optim.max_grad_ratio` does not clip.
      scaler: scales the loss if the runtime computes in float16.
      step: optimizer steps done.
      best_score: score of the best evaluation so far, higher is better; None before the first one.
      waited: evaluations since the best score, and how often the learning rate was cut.
      input_processes: for how many input processes the data position is valid; 0: for any number.
      skipped_steps: steps whose batches are dropped, as they once gave a non-finite loss.
    """

    model: nn.Module
    loss_modules: nn.Module
    optimizer: torch.optim.Optimizer
    averages: dict[str, nn.Module] = field(default_factory=dict)
    head: Sequence[nn.Parameter] = ()
    scaler: torch.amp.GradScaler | None = None
    step: int = 0
    best_score: float | None = None
    waited: Stagnation = field(default_factory=Stagnation)
    input_processes: int = 0
    skipped_steps: tuple[int, ...] = ()

    @property
    def ema(self) -> nn.Module | None:
        """The first average; None if none is kept."""
        return self.averages.get("ema")

    @property
    def eval_model(self) -> nn.Module:
        """The weights that are evaluated and exported: the first average if there is one."""
        return self.averages.get("ema", self.model)

    def parameters(self) -> list[nn.Parameter]:
        """Return all trained parameters: the student's and those of the losses' projections."""
        return [*self.model.parameters(), *self.loss_modules.parameters()]

    def get_replicated(self) -> dict[str, Tensor]:
        """Return the tensors that are the same on every rank: weights, averages and projections."""
        tensors = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        tensors |= {f"extra.{k}": v for k, v in self.loss_modules.named_parameters()}
        for name, average in self.averages.items():
            tensors |= {f"{name}.{k}": v for k, v in average.state_dict().items()}
        return tensors


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a step is made, and at which optimizer steps things happen; constant for a run.

    Args:
      schedule: learning rate and weight decay of each step.
      accumulate_steps: micro-batches of one optimizer step.
      global_batch_size: examples of one optimizer step over all ranks.
      early_stop: ends the run if the score has not risen for long enough.
      flops_per_example: floating-point operations of a step's matrix products; None if unknown.
    """

    total_steps: int
    steps_per_epoch: int
    log_every: int
    eval_every: int
    checkpoint_every: int
    seed: int
    graph_budget: int
    schedule: Schedule
    global_batch_size: int
    accumulate_steps: int = 1
    averaging: Averaging = field(default_factory=Averaging)
    clipping: Clipping = field(default_factory=Clipping)
    early_stop: EarlyStop = field(default_factory=EarlyStop)
    flops_per_example: float | None = None

    def is_over(self, state: TrainState) -> bool:
        """Return whether a run has reached its planned end or an early stop."""
        return state.step >= self.total_steps or self.early_stop.is_over(state.waited)


@dataclass(frozen=True)
class StepResult:
    """Results of one step, its numbers still on the device.

    Args:
      step: steps done, this one included.
      values: float32 [names + 1] on the device: the scalars' mean over ranks; the last element is
        the number of this loop's first non-finite step, or -1. None if the step was skipped.
      wait_s: seconds that the step waited for its batch.
    """

    step: int
    names: tuple[str, ...]
    values: Tensor | None
    wait_s: float


class Callbacks:
    """Hooks that the training loop calls. Override what you need."""

    def get_batches(self, step: int) -> Iterable[Batch]:
        """Return host batches from a step on."""
        raise NotImplementedError

    def evaluate(self, state: TrainState) -> Evaluation:
        """Evaluate the current state."""
        return Evaluation({}, -math.inf)

    def write(self, step: int, kind: str, scalars: dict[str, float]) -> None:
        """Write a line of numbers: `train` at log points, `eval` after an evaluation.

        Parts of the loss are called `loss/<term>`; metrics have the task's own names.
        """

    def save(self, state: TrainState, best: bool) -> None:
        """Save a checkpoint; `best`: its evaluation has the highest score so far."""

    def begin_step(self, step: int) -> None:
        """Prepare for a step that is about to begin: a trace may start or end."""

    def should_stop(self, step: int) -> bool:
        """Return whether to save and end after this many steps; the same on all ranks."""
        return False

    def roll_back(self, state: TrainState, bad_step: int) -> bool:
        """Restore the state from before a non-finite step; return False if that is not possible."""
        return False


def upload_numbers(
    state: TrainState, plan: Plan, runtime: Runtime, first_bad_step: Tensor | None = None
) -> StepNumbers:
    """Upload what the host knows of the next step."""
    lrs, decays = plan.schedule.values(state.step, state.optimizer, state.waited.cuts)
    rates = runtime.updates.set_hyperparameters(state.optimizer, lrs, decays)
    weights = plan.averaging.get_weights(state.step) if state.averages else []
    uploaded = runtime.upload(weights) if weights else None
    return StepNumbers(rates, uploaded, runtime.upload([float(state.step)]), first_bad_step)


def train_step(
    state: TrainState,
    batch: BatchT,
    task: Task[BatchT],
    runtime: Runtime,
    plan: Plan,
    numbers: StepNumbers,
) -> dict[str, Tensor]:
    """Run one optimizer step, a function of tensors; the returned scalars stay on the device."""
    totals: dict[str, Tensor] = {}
    for micro_batch in runtime.split(batch, plan.accumulate_steps):
        with runtime.autocast():
            loss = task.loss(state.model, micro_batch)
        runtime.backward(loss.total / plan.accumulate_steps, last=micro_batch.is_last)
        for name, value in loss.terms.items():
            totals[name] = totals.get(name, 0.0) + value / plan.accumulate_steps
    # The mean over ranks comes before clipping, or each rank would clip to its own norm.
    runtime.ranks.reduce_gradients(state.optimizer)
    runtime.updates.unscale(state.optimizer)
    grad_norm = clip_gradients(state.parameters(), plan.clipping, state.head)
    runtime.updates.apply(state.optimizer, numbers.rates)
    if numbers.average_weights is not None:
        update_averages(state.averages.values(), state.model, numbers.average_weights)
    return {**{LOSS + name: value for name, value in totals.items()}, "grad_norm": grad_norm}


def run_steps(
    state: TrainState,
    batches: Iterable[BatchT],
    task: Task[BatchT],
    runtime: Runtime,
    plan: Plan,
    begin_step: Callable[[int], None] = lambda step: None,
) -> Generator[StepResult]:
    """Train on one batch after the other; the caller decides what happens in between, and when.

    A caller that leaves early closes the loop (`contextlib.closing`) to end the feeder's thread.

    Args:
      batches: on the host, from `state.step` on.
      begin_step: called with the number of each step before it begins.
    """
    return _Stepper(state, task, runtime, plan).iterate(batches, begin_step)


class _Stepper(Generic[BatchT]):
    """Makes steps; keeps on the device the number of the first one that was not finite."""

    def __init__(self, state: TrainState, task: Task[BatchT], runtime: Runtime, plan: Plan) -> None:
        self.state, self.task, self.runtime, self.plan = state, task, runtime, plan
        self._names: tuple[str, ...] = ()
        self._first_bad_step = runtime.upload([-1.0]).sum()  # no view of the vector
        self._compute = runtime.compile_step(self._compute_step, plan.graph_budget)
        runtime.finish_step()  # compiled on its own, not as a part of the first step's graph

    def iterate(
        self, batches: Iterable[BatchT], begin_step: Callable[[int], None]
    ) -> Generator[StepResult]:
        state = self.state
        with self.runtime.prefetch(batches) as feeder:
            state.model.train()
            state.loss_modules.train()
            while True:
                begin_step(state.step)
                with self.runtime.span("input"):
                    batch = next(feeder, None)
                if batch is None:
                    return
                names, values = self.make_step(batch)
                state.step += 1
                yield StepResult(state.step, names, values, feeder.wait_s)

    def make_step(self, batch: BatchT) -> tuple[tuple[str, ...], Tensor | None]:
        """Run one step: names of its scalars and their values; None if the step is skipped."""
        state, runtime = self.state, self.runtime
        if state.step in state.skipped_steps:
            return (), None
        with runtime.span("step"), runtime.step(self.plan.seed, state.step):
            numbers = upload_numbers(state, self.plan, runtime, self._first_bad_step)
            values, self._first_bad_step = self._compute(batch, numbers)
        return self._names, values

    def _compute_step(self, batch: BatchT, numbers: StepNumbers) -> tuple[Tensor, Tensor]:
        """Compute one step: its values, and the number of the first step that was not finite."""
        scalars = train_step(self.state, batch, self.task, self.runtime, self.plan, numbers)
        self._names = tuple(scalars)
        # One vector, made in every step: the same graph whether or not it is read.
        values = torch.stack([v.detach().float().reshape(()) for v in scalars.values()])
        values = self.runtime.ranks.mean(values)
        # A scaled loss lets the last value, the gradient norm, overflow: that step is dropped.
        watched = values if self.state.scaler is None else values[:-1]
        _, _, step, first = numbers
        assert first is not None and step is not None
        first = torch.where((first < 0) & ~torch.isfinite(watched).all(), step[0], first)
        return torch.cat([values, first.reshape(1)]), first


def evaluate(
    model: nn.Module, batches: Iterable[BatchT], task: Task[BatchT], runtime: Runtime
) -> Evaluation:
    """Evaluate host batches of one shape: each valid example once, however they are batched."""
    was_training = model.training
    model.eval()
    sums = sum_batches(lambda batch: task.count(model, batch), batches, runtime)
    model.train(was_training)
    return task.summarise(sums)


@torch.no_grad()
def sum_batches(
    count: Callable[[BatchT], Tensor], batches: Iterable[BatchT], runtime: Runtime
) -> Tensor:
    """Sum `count` over all batches of all ranks, on the host."""  # host read: one for all batches
    sums: Tensor | None = None

    def add(batch: BatchT) -> Tensor:
        nonlocal sums
        counted = count(batch)
        if sums is None:
            # The zeros are uploaded, not a constant: the first batch has the graph of the others.
            sums = runtime.upload(torch.zeros(counted.numel()))
        sums = counted + sums
        return sums

    for _ in map_batches(add, batches, runtime):
        pass
    assert sums is not None, "an evaluation without batches"
    return runtime.fetch(runtime.ranks.sum(sums))


def map_batches(
    function: Callable[[BatchT], T], batches: Iterable[Any], runtime: Runtime
) -> Generator[tuple[BatchT, T]]:
    """Yield device batches and a function's result for each, one batch at a time."""
    with runtime.prefetch(batches) as feeder:
        for batch in feeder:
            with runtime.autocast():
                result = function(batch)
            runtime.finish_step()
            yield batch, result


def fit(
    state: TrainState, plan: Plan, callbacks: Callbacks, task: Task[Any], runtime: Runtime
) -> Evaluation:
    """Train to the plan's end or an early stop; return the last evaluation.

    The order: [batch -> step -> log -> checkpoint -> evaluate]* -> final checkpoint -> barrier.
    A state that was restored at a step with an evaluation is evaluated first: the run may have
    ended between checkpoint and evaluation.

    Raises:
      PreemptedError: the run was asked to end; its state is saved.
      NonFiniteError: a loss or gradient was not finite, and the run is not rolled back.
      NonFiniteEvaluationError: the last evaluation was not finite; its state is not saved.
    """
    runtime.ranks.check_replicas(state.get_replicated(), "at the start")
    loop = _Loop(state, plan, callbacks, task, runtime)
    while True:
        try:
            evaluation = loop.run()
            break
        except NonFiniteError as error:
            if not callbacks.roll_back(state, error.step):
                raise
    if not evaluation.is_finite:
        raise NonFiniteEvaluationError(evaluation.describe_fault(state.step))
    loop.save()
    runtime.ranks.check_replicas(state.get_replicated(), "at the end")
    runtime.ranks.barrier("end of training")
    return evaluation


class _Loop:
    """Work between the steps of a run."""

    def __init__(
        self, state: TrainState, plan: Plan, callbacks: Callbacks, task: Task[Any], runtime: Runtime
    ) -> None:
        self.state, self.plan, self.callbacks = state, plan, callbacks
        self.task, self.runtime = task, runtime
        unit, per_example = task.unit
        self.units_per_step = plan.global_batch_size * per_example
        flops = None if plan.flops_per_example is None else plan.flops_per_example / per_example
        self.meter = LoopMeter(
            runtime, plan.graph_budget, plan.steps_per_epoch, unit, flops_per_unit=flops
        )
        self.last: StepResult | None = None  # the last result with values

    def run(self) -> Evaluation:
        """Run all remaining steps with the work between them; return the last evaluation."""
        state, plan, runtime = self.state, self.plan, self.runtime
        self.last = None
        evaluation = Evaluation({}, -math.inf)
        if state.step and (state.step % plan.eval_every == 0 or plan.is_over(state)):
            evaluation = self.evaluate()
        if plan.is_over(state):
            return evaluation
        batches = self.callbacks.get_batches(state.step)
        steps = run_steps(
            state, batches, self.task, runtime, plan, begin_step=self.callbacks.begin_step
        )
        self.meter.end_setup()
        with contextlib.closing(steps):
            for result in steps:
                self.last = self.last if result.values is None else result
                self.meter.end_step(result.step, self.units_per_step, result.wait_s)
                # A log line is read one step late: the device then works on the next step.
                runtime.flush_deferred()
                is_end = result.step == plan.total_steps
                if result.step % plan.log_every == 0 or is_end:
                    self.log(result)
                if result.step % plan.checkpoint_every == 0 and not is_end:
                    # What is logged is written before what is saved: a checkpoint counts on it.
                    runtime.flush_deferred()
                    self.save()
                # Before the evaluation, so that a request to stop waits for a checkpoint at most.
                if not is_end and self.callbacks.should_stop(result.step):
                    runtime.flush_deferred()
                    self.save()
                    raise PreemptedError(result.step)
                if result.step % plan.eval_every == 0 or is_end:
                    runtime.flush_deferred()  # the steps' lines come before the evaluation's
                    evaluation = self.evaluate()
                if plan.is_over(state):
                    return evaluation
        raise RuntimeError(f"the batches ended at step {state.step} of {plan.total_steps}")

    def log(self, result: StepResult) -> None:
        """Write a log line; its values are read one step behind the device.

        A skipped step has no values: its line has no loss.
        """
        lr = self.plan.schedule.get_lr(result.step - 1, self.state.waited.cuts)
        facts = {"lr": lr, **self.meter.take(result.step)}
        if result.values is None:
            self.callbacks.write(result.step, TRAIN, facts)
            return

        def write(host: Tensor) -> None:
            *values, bad_step = host.tolist()
            scalars = dict(zip(result.names, values, strict=True))
            self.callbacks.write(result.step, TRAIN, {**scalars, **facts})
            if bad_step >= 0:
                raise NonFiniteError(int(bad_step))

        self.runtime.defer(write, scalars=result.values)

    def evaluate(self) -> Evaluation:
        """Evaluate the state; save the best one so far before writing its line."""
        state, runtime = self.state, self.runtime
        self._average_buffers()
        with runtime.span("evaluation"), self.meter.phase("eval", state.step):
            runtime.ranks.check_replicas(state.get_replicated(), f"after step {state.step}")
            evaluation = self.callbacks.evaluate(state)
        state.model.train()
        state.waited = self.plan.early_stop.count(state.waited, state.step, evaluation.score)
        if not evaluation.is_finite:
            get_logger().warning("%s", evaluation.describe_fault(state.step))
        elif evaluation.score > (-math.inf if state.best_score is None else state.best_score):
            self._require_finite()
            state.best_score = evaluation.score
            self.callbacks.save(state, True)
        line = {**evaluation.all_metrics, **self.meter.get_graphs()}
        self.callbacks.write(state.step, EVAL, line)
        return evaluation

    def save(self) -> None:
        """Save a checkpoint of a state that is finite."""
        self._require_finite()
        self._average_buffers()
        with self.runtime.span("checkpoint"):
            self.callbacks.save(self.state, False)

    def _require_finite(self) -> None:
        """Refuse to save the result of a bad step."""  # host read: checkpoints only
        if self.last is None or self.last.values is None:
            return
        bad_step = int(self.runtime.fetch(self.last.values)[-1])
        if bad_step >= 0:
            raise NonFiniteError(bad_step)

    def _average_buffers(self) -> None:
        """Average BatchNorm's running statistics over ranks: each has those of its own examples."""
        for model in (self.state.model, *self.state.averages.values()):
            self.runtime.ranks.average_buffers(model)
        # Other buffers of a loss, such as a memory bank, already hold the examples of all ranks.
        self.runtime.ranks.average_buffers(self.state.loss_modules, "running_")
