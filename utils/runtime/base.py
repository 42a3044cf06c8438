"""`Runtime`: the interface of the engine to a device."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar, TypeVarTuple

import torch
import torch.profiler
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from utils.config.execution import RuntimeSection
from utils.json_types import JsonObject
from utils.runtime.compilation import ModelCompiler
from utils.runtime.feeding import Feeder
from utils.runtime.instruments import Instruments
from utils.runtime.processes.ranks import Alone, Ranks
from utils.runtime.processes.sequence import count_sequence_parts, set_sequence_axis
from utils.runtime.profiles.chrome import read_trace
from utils.runtime.profiles.ranges import ModuleRanges
from utils.runtime.updates import Updates
from utils.torch_types import ModuleT, P, T

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class BatchLike(Protocol):
    """The operations of a batch that runtimes need."""

    @property
    def is_last(self) -> bool: ...

    def map(
        self, fn: Callable[[Tensor], Tensor], of_step: Callable[[Tensor], Tensor] | None = None
    ) -> Self: ...

    def split(self, parts: int, blocks: int = 1) -> list[Self]: ...


class HasLoss(Protocol):
    """The operation of a task that runtimes need."""

    def loss(self, model: nn.Module, batch: Any) -> Any: ...


B = TypeVar("B", bound=BatchLike)
Ts = TypeVarTuple("Ts")
Numbers = TypeVar("Numbers", bound=tuple[Tensor | None, ...])
Task = TypeVar("Task", bound=HasLoss)


class Runtime(ABC):
    """A device, and the few operations that differ between devices.

    The engine uses devices only through this class; nothing above it may assume lazy tensors, a
    process group, or a particular device.
    """

    name: str
    device: torch.device
    ranks: Ranks  # operations with the run's other processes
    updates: Updates  # optimizer steps on the device
    section: RuntimeSection
    instruments: Instruments  # readings of the device and its loop beside results
    _runs_modules = False  # whether each step calls the modules, instead of a program made of them
    local_devices: int = 1  # over which this process's part of a batch is split

    def __init__(self, section: RuntimeSection) -> None:
        self.section = section
        set_sequence_axis(1)
        self.ranks = Alone()
        self.updates = self._create_updates()
        self.instruments = self._create_instruments()
        self._compiler = ModelCompiler(section, self.name, lambda: self.counters()["host_ops"])
        if section.num_threads:
            torch.set_num_threads(section.num_threads)
        self._pending: list[tuple[Callable[[Tensor], None], Tensor]] = []
        self._declared_reads = 0

    def _create_updates(self) -> Updates:
        return Updates(self)

    def _create_instruments(self) -> Instruments:
        return Instruments(self)

    @property
    def wants_patches(self) -> bool:
        """Whether models are rewritten in plain operations for the device's compiler."""
        return False

    @property
    def fp32_weight_gradients(self) -> bool:
        """Whether products of weight gradients must be float32, because they are summed so."""
        return False

    @property
    def device_count(self) -> int:
        """Number of devices that a global batch is split over."""
        return self.ranks.size * self.local_devices

    def make_deterministic(self) -> list[str]:
        """Select operations with reproducible bits; return further conditions as sentences."""
        return ["the same bits need the same versions, kind of device and number of devices"]

    def prepare(self, module: ModuleT) -> ModuleT:
        """Move a module to the device, with rank zero's weights on every rank."""
        module.to(self.device)
        self.ranks.broadcast([*module.parameters(), *module.buffers()])
        return module

    def accelerate(self, module: ModuleT) -> ModuleT:
        """Compile or lay out the forward pass of a model on the device, if configured."""
        self._compiler.attach(module)
        return module

    def prepare_task(self, task: Task, model: nn.Module, loss_modules: nn.Module) -> Task:
        """Return the task for the loop; it may sum gradients during the backward pass."""
        return task

    def compile_step(
        self, function: Callable[[B, Numbers], T], graph_budget: int
    ) -> Callable[[B, Numbers], T]:
        """Return a step's function of a batch and numbers; it may be compiled as one program."""
        return function

    def checkpoint_block(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a block of a model that is recomputed in the backward pass."""
        result: Any = checkpoint(partial(function, **kwargs), *args, use_reentrant=False)
        return result

    def scan_blocks(self, blocks: Sequence[nn.Module], inputs: Tensor) -> Tensor:
        """Run equal blocks in sequence, as one compiled loop if the device has one."""
        for block in blocks:
            inputs = block(inputs)
        return inputs

    def trace_once(self, model: nn.Module, *inputs: Tensor) -> None:
        """Trace a model on this rank's host inputs before step 0, if tracing has side effects."""
        return

    def upload(self, values: Sequence[float] | Tensor) -> Tensor:
        """Upload host numbers as one float32 vector: data, never constants of a graph."""
        return torch.as_tensor(values, dtype=torch.float32).to(self.device)

    @contextlib.contextmanager
    def step(self, seed: int, step: int) -> Iterator[None]:
        """Seed the device before an optimizer step, and finish the step after it."""
        self._seed(seed, step)
        yield
        self.finish_step()
        self._compiler.end_step()

    @abstractmethod
    def _seed(self, seed: int, step: int) -> None:
        """Seed the device's generator from (seed, step, rank)."""

    def finish_step(self) -> None:
        """Dispatch recorded work at the end of a step or of an evaluation batch."""
        return

    def autocast(self) -> torch.autocast | contextlib.nullcontext[None]:
        """Create a context that computes matmuls in `runtime.precision`."""
        if self.section.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=DTYPES[self.section.precision])

    def prefetch(self, batches: Iterable[B], depth: int = 2) -> Feeder[B]:
        """Move batches to the device in a thread, `depth` ahead; the caller gets its errors."""
        return Feeder(batches, self.to_device, depth)

    def to_device(self, batch: B) -> B:
        """Move a host batch to the device; its values of the step are whole on every device."""
        return batch.map(self.tensor_to_device, self._replicate)

    def split(self, batch: B, parts: int) -> list[B]:
        """Split a batch on the device into micro-batches, each on all devices of the batch."""
        return batch.split(parts, self.local_devices)

    def tensor_to_device(self, tensor: Tensor) -> Tensor:
        """Move a host tensor to the device, split along its first axis over several devices."""
        return tensor.to(self.device)

    def _replicate(self, tensor: Tensor) -> Tensor:
        """Move a host tensor, equal on all ranks, whole to every device."""
        return self.tensor_to_device(tensor)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Compute gradients of a micro-batch; `last` allows communication between ranks."""
        loss.backward()

    def keep_gradients_apart(self, module: nn.Module) -> None:
        """Sum the micro-batches' gradients over devices only once, at the end of the step."""
        return

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Name a span of the loop for traces and a watchdog."""
        with self.instruments.note_span(name), self._annotate(name):
            yield

    def _annotate(self, name: str) -> contextlib.AbstractContextManager[object]:
        return torch.profiler.record_function(name)

    @contextlib.contextmanager
    def trace(self, folder: Path, name: str, modules: Mapping[nn.Module, str]) -> Iterator[None]:
        """Record host and device to `rank_0_NAME.pt.trace.json` for TensorBoard and Perfetto.

        `modules` are names of those whose forward passes are marked, unless they are compiled.
        """
        folder.mkdir(parents=True, exist_ok=True)
        named = {} if self.section.compile or not self._runs_modules else modules
        with torch.profiler.profile(profile_memory=True) as profile, ModuleRanges(named):
            yield
        profile.export_chrome_trace(str(self._get_trace(folder, name)))

    def name_operations(
        self, models: Mapping[str, nn.Module]
    ) -> contextlib.AbstractContextManager[object]:
        """Name what steps record by the module it comes from while entered, if traces need it."""
        del models
        return contextlib.nullcontext()

    def read_profile(self, folder: Path, name: str) -> JsonObject | None:
        """Read where the time of a trace's steps went; None if it does not name them."""
        return read_trace(self._get_trace(folder, name))

    def _get_trace(self, folder: Path, name: str) -> Path:
        return folder / f"rank_{self.ranks.index}_{name}.pt.trace.json"

    def fetch(self, tensor: Tensor) -> Tensor:
        """Copy to host memory: one declared host read, which waits for the device."""
        self._declared_reads += 1
        return tensor.detach().cpu()

    def fetch_all(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy many tensors to the host in one read."""
        self._declared_reads += 1
        return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}

    def defer(self, function: Callable[[*Ts, Tensor], None], *args: *Ts, scalars: Tensor) -> None:
        """Call `function(*args, host_scalars)` at the next `flush_deferred`.

        That is one step behind the device: when the read waits for a step, the next one is
        already running, so the device never idles; the loop gets an error of `function`.
        """
        self._pending.append((lambda host: function(*args, host), scalars))

    def flush_deferred(self) -> None:
        """Call the deferred functions."""  # host read: log steps only
        pending = self._pending
        self._pending = []
        for function, scalars in pending:
            function(self.fetch(scalars))

    def counters(self) -> dict[str, int]:
        """Count since the start: `graphs` compiled, undeclared `host_reads`, `host_ops`."""
        return {"graphs": 0, "host_reads": 0, "host_ops": 0}

    def describe(self) -> JsonObject:
        """Return the device's facts for run.json."""
        return {
            "runtime": self.name,
            "device": str(self.device),
            "world_size": self.ranks.size,
            "devices": self.device_count * count_sequence_parts(),
            **({"compiler": self._compiler.backend} if self._compiler.backend else {}),
        }


def derive_seed(seed: int, step: int, rank: int) -> int:
    """Derive a 31-bit seed that differs between runs, steps and ranks (SplitMix64's finaliser)."""
    mask = (1 << 64) - 1
    value = (
        seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB
    ) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return (value ^ (value >> 31)) & 0x7FFFFFFF
