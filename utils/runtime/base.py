"""`Runtime`: all that the engine may ask of a device."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

import torch
import torch.profiler
import torch.utils.checkpoint
from torch import Tensor, nn

from utils.json_types import JsonObject
from utils.runtime.compilation import ModelCompiler
from utils.runtime.feeding import Feeder
from utils.runtime.instruments import Instruments
from utils.runtime.processes.ranks import Alone, Ranks
from utils.runtime.processes.sequence import count_sequence_parts, set_sequence_axis
from utils.runtime.updates import Updates

if TYPE_CHECKING:
    from utils.config.execution import RuntimeSection

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class BatchLike(Protocol):
    """What a runtime asks of a batch: that it can be moved and cut, and where a step ends."""

    @property
    def is_last(self) -> bool: ...

    def map(
        self, fn: Callable[[Tensor], Tensor], of_step: Callable[[Tensor], Tensor] | None = None
    ) -> Self: ...

    def split(self, parts: int, blocks: int = 1) -> list[Self]: ...


class HasLoss(Protocol):
    """What a runtime asks of a task: that its loss can be called in another way."""

    def loss(self, model: nn.Module, batch: BatchLike) -> object: ...


B = TypeVar("B", bound=BatchLike)
T = TypeVar("T")
Task = TypeVar("Task", bound=HasLoss)


class Runtime(ABC):
    """A device, and the few operations that differ between devices.

    The engine works through this seam alone; nothing above it may assume lazy tensors, a process
    group, or a particular device.

    Attributes:
      ranks: what this process does together with the run's other ones.
      updates: how an optimizer changes weights on the device.
      section: what the configuration says of the device.
      local_devices: that this process's part of a batch is dealt to.
      instruments: what can be read off the device and its loop beside results.
    """

    name: str
    device: torch.device
    ranks: Ranks
    updates: Updates
    section: RuntimeSection
    instruments: Instruments
    local_devices: int = 1

    def __init__(self, section: RuntimeSection) -> None:
        self.section = section
        set_sequence_axis(1)
        self.ranks = Alone()
        self.updates = self._create_updates()
        self.instruments = self._create_instruments()
        self._compiler = ModelCompiler(section, self.name, lambda: self.counters()["host_ops"])
        if section.num_threads:
            torch.set_num_threads(section.num_threads)
        self._pending: list[tuple[Callable[..., None], tuple[object, ...], Tensor]] = []
        self._declared_reads = 0

    def _create_updates(self) -> Updates:
        """The device's own way with optimizers."""
        return Updates(self)

    def _create_instruments(self) -> Instruments:
        """The device's own way of telling how it fares."""
        return Instruments(self)

    @property
    def wants_patches(self) -> bool:
        """Whether models are rewritten in plain operations, which its compiler likes best."""
        return False

    @property
    def fp32_weight_gradients(self) -> bool:
        """Whether products that give weight gradients must do so in float32: they are summed so."""
        return False

    @property
    def device_count(self) -> int:
        """Devices that a global batch is dealt to."""
        return self.ranks.size * self.local_devices

    def make_deterministic(self) -> list[str]:
        """Choose operations that give the same bits each time.

        Returns:
          What else the same bits need here, and what cannot have them, for a person to read.
        """
        return ["the same bits need the same versions, kind of device and number of devices"]

    def prepare(self, module: nn.Module) -> nn.Module:
        """The module on the device, with rank zero's weights on every rank."""
        module.to(self.device)
        self.ranks.broadcast([*module.parameters(), *module.buffers()])
        return module

    def accelerate(self, module: nn.Module) -> nn.Module:
        """A placed model whose forward pass may be compiled or laid out for the device."""
        self._compiler.attach(module)
        return module

    def prepare_task(self, task: Task, model: nn.Module, loss_modules: nn.Module) -> Task:
        """The task as the loop calls it: may begin to sum gradients in the backward pass."""
        return task

    def checkpoint_block(self, function: Callable[..., T], *args: object, **kwargs: object) -> T:
        """Call a block of a model that is computed again in the backward pass."""
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)

    def scan_blocks(self, blocks: Sequence[nn.Module], inputs: Tensor) -> Tensor:
        """Run equal blocks one after the other as one compiled loop, where there is one."""
        for block in blocks:
            inputs = block(inputs)
        return inputs

    def trace_once(self, model: nn.Module, *inputs: Tensor) -> None:
        """Let a model be traced before step 0, where tracing itself leaves something behind.

        Args:
          inputs: on the host, as the model takes them: this rank's part of a micro-batch.
        """
        return

    def upload(self, values: Sequence[float] | Tensor) -> Tensor:
        """Host numbers as one float32 vector on the device: data, never constants of a graph."""
        return torch.as_tensor(values, dtype=torch.float32).to(self.device)

    @contextlib.contextmanager
    def step(self, seed: int, step: int) -> Iterator[None]:
        """Around one optimizer step: seeds the device before it, finishes the step after it."""
        self._seed(seed, step)
        yield
        self.finish_step()
        self._compiler.end_step()

    @abstractmethod
    def _seed(self, seed: int, step: int) -> None:
        """Seed the device's generator from (seed, step, rank)."""

    def finish_step(self) -> None:
        """End of a step or of an evaluation batch: dispatch what has been recorded."""
        return

    def autocast(self) -> contextlib.AbstractContextManager:
        """Compute matmuls in `runtime.precision`."""
        if self.section.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=DTYPES[self.section.precision])

    def prefetch(self, batches: Iterable[B], depth: int = 2) -> Feeder[B]:
        """Batches moved to the device by a thread, `depth` ahead; its errors reach the caller."""
        return Feeder(batches, self.to_device, depth)

    def to_device(self, batch: B) -> B:
        """A host batch on the device; its values of the step are whole on every device."""
        return batch.map(self.tensor_to_device, self._replicate)

    def split(self, batch: B, parts: int) -> list[B]:
        """Micro-batches of a placed batch, each on all devices that the batch is dealt to."""
        return batch.split(parts, self.local_devices)

    def tensor_to_device(self, tensor: Tensor) -> Tensor:
        """A host tensor on the device; its first axis is dealt out where there are several."""
        return tensor.to(self.device)

    def _replicate(self, tensor: Tensor) -> Tensor:
        """A host tensor, alike on all ranks, as a whole on every device."""
        return self.tensor_to_device(tensor)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Gradients of a micro-batch; `last` allows communication between ranks to begin."""
        loss.backward()

    def keep_gradients_apart(self, module: nn.Module) -> None:
        """Have micro-batches' gradients added up over devices once; nothing to do on one device."""
        return

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """A named stretch of the loop, as traces and a watchdog see it."""
        with self.instruments.note_span(name), self._annotate(name):
            yield

    def _annotate(self, name: str) -> contextlib.AbstractContextManager[object]:
        """A name in the trace for what happens inside."""
        return torch.profiler.record_function(name)

    @contextlib.contextmanager
    def trace(self, folder: Path, name: str) -> Iterator[None]:
        """Record what host and device do, readable by TensorBoard and Perfetto.

        Args:
          name: of what is recorded; the file is called `rank_0_NAME.pt.trace.json`.
        """
        path = folder / f"rank_{self.ranks.index}_{name}.pt.trace.json"
        folder.mkdir(parents=True, exist_ok=True)
        with torch.profiler.profile() as profile:
            yield
        profile.export_chrome_trace(str(path))

    def fetch(self, tensor: Tensor) -> Tensor:
        """A copy in host memory: one declared host read, waits for the device."""
        self._declared_reads += 1
        return tensor.detach().cpu()

    def fetch_all(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Host copies of many tensors in one read."""
        self._declared_reads += 1
        return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}

    def defer(self, function: Callable[..., None], *args: object, scalars: Tensor) -> None:
        """Call `function(*args, host_scalars)` at the next `flush_deferred`.

        That is one step behind the device: the read then waits for a step that has a successor in
        flight, so the device never idles, and an error in `function` reaches the loop.
        """
        self._pending.append((function, args, scalars))

    def flush_deferred(self) -> None:
        """Carry out what was deferred. # host read: log steps only"""
        pending, self._pending = self._pending, []
        for function, args, scalars in pending:
            function(*args, self.fetch(scalars))

    def counters(self) -> dict[str, int]:
        """Since the start: `graphs` compiled, undeclared `host_reads`, ops on the host."""
        return {"graphs": 0, "host_reads": 0, "host_ops": 0}

    def describe(self) -> JsonObject:
        """Device facts for run.json."""
        return {
            "runtime": self.name, "device": str(self.device), "world_size": self.ranks.size,
            "devices": self.device_count * count_sequence_parts(),
            **({"compiler": self._compiler.backend} if self._compiler.backend else {}),
        }  # fmt: skip


def derive_seed(seed: int, step: int, rank: int) -> int:
    """A 31-bit seed that differs between runs, steps and ranks (SplitMix64's finaliser)."""
    mask = (1 << 64) - 1
    value = (
        seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB
    ) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return (value ^ (value >> 31)) & 0x7FFFFFFF
