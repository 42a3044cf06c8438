"""Traces the very step that the engine runs and exports it as StableHLO, on a host without a TPU.

`engine.run_steps` runs on the XLA runtime; where its first step would be dispatched, its graph is
taken instead. Weights are random: a compiler does not look at them.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING

import torch

from bill.step.kernels import call_kernels
from bill.step.synthetic_run import describe_example
from bill.step.tracing import StepExport
from engine import run_steps
from job.build import build_parts
from job.check import check
from job.steps.modules import list_models
from job.stream import iterate_batches
from tasks.protocol import Traceable
from utils.config.load import change
from utils.runtime.base import Runtime
from utils.runtime.launcher import find_runtime_class
from utils.runtime.updates import Updates
from utils.runtime.xla.scopes import ScopeLabels

if TYPE_CHECKING:
    from torch import Tensor, nn

    from datasets import Batch
    from engine import Task, TaskLoss
    from job.build import Parts
    from job.spec import Job
    from utils.config.load import RunConfig

# State tensors are told apart by numbers from here on: float32 holds them, and no factor of a step,
# such as the count of micro-batches, is one of them.
_FIRST_NUMBER = 1_000_003
# Files and lines in the text of a program.
_SOURCE_PLACE = re.compile(r' (source_file="[^"]*"|(source|stack_frame)\w*=\d+)')


def prepare_tracing(devices: int = 1) -> None:
    """Set the environment that tracing needs; before torch_xla is imported."""
    os.environ["PJRT_DEVICE"] = "CPU"
    os.environ["XLA_HLO_DEBUG"] = "1"
    os.environ.setdefault("XLA_IR_DEBUG", "1")
    if devices > 1:
        os.environ["CPU_NUM_DEVICES"] = str(devices)


def trace_step(config: RunConfig, chip: str = "", *, is_automatic: bool = False) -> StepExport:
    """Build the run's parts, let the engine make one step and give its graph.

    Args:
      chip: the TPU generation that it is for; empty: none in particular.
      is_automatic: a verdict tells the run how many micro-batches the step has.

    Raises:
      UserError: the run would be refused, for one because no verdict may tell it that.
    """
    runtime = _create_tracing_runtime(config)
    changed = change(config, train={"accumulate_steps": "auto"}) if is_automatic else config
    job = replace(check(changed), config=config)
    with call_kernels(chip), contextlib.closing(build_parts(runtime, job)) as parts:
        runtime.updates.prepare(parts.state.optimizer)
        return _run_step(runtime, job, parts)


class _TracingRuntime(Runtime):
    """Labels the phases of the step, and reports its end instead of dispatching it."""

    on_dispatch: Callable[[], None] | None = None
    label: Callable[[str], None]
    _in_step = False

    def _create_updates(self) -> Updates:
        updates = super()._create_updates()
        # Each device creates its own from other arguments; what it created gets the labels.
        updates.__class__ = type("TracingUpdates", (_TracingUpdates, type(updates)), {})
        return updates

    @contextlib.contextmanager
    def step(self, seed: int, step: int) -> Iterator[None]:
        self._in_step = True
        try:
            with super().step(seed, step):
                self.label("input")
                yield
        finally:
            self._in_step = False

    def finish_step(self) -> None:
        if self._in_step and self.on_dispatch is not None:
            self.on_dispatch()
        else:
            super().finish_step()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self.label("loss")
        super().backward(loss, last=last)
        if last:
            self.label("gradients")


class _TracingUpdates(Updates):
    """Labels the optimizer's step."""

    def apply(self, optimizer: torch.optim.Optimizer, rates: Tensor | None = None) -> None:
        assert isinstance(self._device, _TracingRuntime)
        self._device.label("optimizer")
        super().apply(optimizer, rates)


def _create_tracing_runtime(config: RunConfig) -> _TracingRuntime:
    """Create a runtime of the configuration's device whose step is recorded, never dispatched."""
    # Its own methods come before those of the device's class, which `super()` reaches.
    bases = (_TracingRuntime, find_runtime_class(config.runtime))
    return type("TracingRuntime", bases, {})(config.runtime)


class _TracedTask:
    """A run's task whose loss notes what lies in which memory before the step."""

    def __init__(self, task: Task[Batch], before: Callable[[Batch], None]) -> None:
        self.unit, self.count, self.summarise = task.unit, task.count, task.summarise
        self._task, self._before = task, before

    def loss(self, model: nn.Module, batch: Batch) -> TaskLoss:
        self._before(batch)
        return self._task.loss(model, batch)


def _run_step(runtime: _TracingRuntime, job: Job, parts: Parts) -> StepExport:
    """Let the engine make one step, and take its graph where it would be dispatched."""
    labels = ScopeLabels(list_models(parts))
    numbers = _number_state(runtime, parts) if runtime.local_devices > 1 else {}
    batch_ids: dict[str, int] = {}
    state_ids: dict[str, int] = {}
    alive: list[str] = []

    def note(batch: Batch) -> None:
        labels.enter("loss", "forward")
        batch_ids.update(_get_data_ids(_name_batch(batch)))
        if not state_ids:
            state_ids.update(_get_data_ids(collect_state(parts)))

    def label(role: str) -> None:
        labels.enter(role, "forward")

    def check_gradients() -> None:
        named = parts.state.model.named_parameters()
        alive.extend(name for name, parameter in named if parameter.grad is not None)

    runtime.on_dispatch = check_gradients
    runtime.label = label
    host_ops = runtime.counters()["host_ops"]
    batches = itertools.islice(iterate_batches(parts, 0), 1)
    task = _TracedTask(parts.task, note)
    steps = run_steps(parts.state, batches, task, runtime, parts.plan)
    with contextlib.closing(steps), labels:
        result = next(steps)
        labels.leave()
        assert result.values is not None
        export = _take_graph(parts, {**batch_ids, **state_ids}, result.values, numbers)
    export.gradients_alive = alive
    export.host_ops = _name_host_ops() if runtime.counters()["host_ops"] > host_ops else []
    describe_run(export, job, parts, "torch_xla")
    return export


def describe_run(export: StepExport, job: Job, parts: Parts, stack: str) -> None:
    """Write what a step's run is into its export."""
    export.unit = parts.task.unit
    export.shapes = describe_example(parts.train_loader)
    export.examples = job.config.data.global_batch_size
    export.parameters = parts.count_parameters()
    export.versions = {name: version(name) for name in (stack, "timm")}


def _take_graph(
    parts: Parts, ids: dict[str, int], vector: Tensor, numbers: dict[int, str]
) -> StepExport:
    """Export the pending graph; its results are the state that the step replaces, and the log.

    Args:
      ids: identity of the memory of each named tensor before the step.
      numbers: what was written into state tensors, instead of identities.
    """
    import torch_xla

    bindings = torch_xla._XLAC
    names: list[str] = []
    outputs: list[Tensor] = []
    aliases: list[int] = []
    for name, tensor in collect_state(parts).items():
        text = bindings._get_xla_tensor_debug_info(tensor)
        if not re.search(r"^IR: None$", text, re.MULTILINE):
            names.append(name)
            outputs.append(tensor)
            aliases.append(int(re.findall(r"AliasID: (\d+)", text)[0]))
    names.append("log_vector")
    outputs.append(vector)
    argument_ids, values = bindings._get_tensors_xla_device_data_node(outputs)
    owners = {number: name for name, number in ids.items()}
    arguments = [
        owners.get(number, f"input{list(value.shape)}" if value.dim() else "scalar")
        for number, value in zip(argument_ids, values, strict=True)
    ]
    positions = {number: position for position, number in enumerate(argument_ids)}
    donations = {positions[a]: r for r, a in enumerate(aliases) if a in positions}
    if numbers:
        arguments = _name_by_numbers(arguments, values, numbers)
        places = {name: position for position, name in enumerate(arguments)}
        donations = {places[n]: r for r, n in enumerate(names) if n in places}
    strayed = [names[r] for a, r in donations.items() if arguments[a] != names[r]]
    assert not strayed, f"another tensor's memory goes to {strayed[:3]}"
    kept = set(donations.values())
    bytecode = bindings._get_stablehlo(outputs, str(vector.device), [], True)
    digest = compute_digest(bindings._get_xla_tensors_hlo(outputs))
    undonated = [n for r, n in enumerate(names[:-1]) if r not in kept]
    return StepExport(bytecode, digest, arguments, donations, [], undonated)


def compute_digest(hlo: str) -> str:
    """Hash of a program's text and its modules' names, wherever their source stands."""
    return hashlib.sha256(_SOURCE_PLACE.sub("", hlo).encode()).hexdigest()


def _number_state(runtime: Runtime, parts: Parts) -> dict[int, str]:
    """Fill every state tensor with a number of its own: sharded memory has no lasting identity."""
    numbers = {}
    with torch.no_grad():
        for number, (name, tensor) in enumerate(collect_state(parts).items(), start=_FIRST_NUMBER):
            if tensor.dtype in (torch.float32, torch.int64, torch.int32):
                tensor.copy_(torch.full(tensor.shape, number, dtype=tensor.dtype))
                numbers[number] = name
    runtime.finish_step()
    return numbers


def _name_by_numbers(
    arguments: list[str], values: list[Tensor], numbers: dict[int, str]
) -> list[str]:
    """Arguments whose memory holds a state tensor's number get its name."""
    import torch_xla

    named = list(arguments)
    for position, value in enumerate(torch_xla._XLAC._xla_get_cpu_tensors(values)):
        flat = value.flatten()
        if flat.numel() and flat[0].item() == flat[-1].item():
            name = numbers.get(flat[0].item())
            named[position] = name or named[position]
    return named


def _name_batch(batch: Batch) -> dict[str, Tensor]:
    """Name the tensors of a batch on the device, as arguments of the step."""
    travelling = {**batch.get_tensors(), **batch.draws, **batch.values}
    return {f"batch/{name}": value for name, value in travelling.items()}


def _name_host_ops() -> list[str]:
    """Operators that torch_xla has run on the host in this process."""
    from torch_xla.debug import metrics

    return sorted(n for n in metrics.counter_names() if n.startswith("aten::"))


def collect_state(parts: Parts, device: str = "xla") -> dict[str, Tensor]:
    """Collect the device tensors that a step reads and replaces, by name."""
    state = parts.state
    tensors = dict(state.model.named_parameters(prefix="model"))
    tensors |= dict(state.model.named_buffers(prefix="model"))
    tensors |= dict(state.loss_modules.named_parameters(prefix="extra"))
    tensors |= dict(state.loss_modules.named_buffers(prefix="extra"))
    for name, average in state.averages.items():
        tensors |= dict(average.named_parameters(prefix=name))
        tensors |= dict(average.named_buffers(prefix=name))
    names = {id(tensor): name for name, tensor in tensors.items()}
    for parameter, values in state.optimizer.state.items():
        for key, value in values.items():
            if hasattr(value, "device") and value.device.type == device:
                tensors[f"optimizer/{names[id(parameter)]}|{key}"] = value
    modules = parts.task.get_modules() if isinstance(parts.task, Traceable) else {}
    for name, module in modules.items():
        tensors |= dict(module.named_parameters(prefix=name))
        tensors |= dict(module.named_buffers(prefix=name))
    return {n: t for n, t in tensors.items() if t is not None and t.device.type == device}


def _get_data_ids(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Identity of the memory behind each tensor; of those that hold data."""
    import torch_xla

    numbers = {}
    for name, tensor in tensors.items():
        ids, _ = torch_xla._XLAC._get_tensors_xla_device_data_node([tensor])
        if len(ids) == 1:
            numbers[name] = ids[0]
    return numbers
