"""`Runtime`: all that the engine may ask of a device and of the other ranks."""

from __future__ import annotations

import contextlib
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.profiler
import torch.utils.checkpoint
from torch import Tensor, nn

from utils.runtime.feeding import Feeder

if TYPE_CHECKING:
    from utils.config.sections import RuntimeSection
    from utils.runtime.group import Group

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class ReplicaError(RuntimeError):
    """The ranks' weights are not the same; the text names the ranks and the first tensor."""


class Runtime(ABC):
    """A device, its rank among equals, and the few operations that differ between devices.

    The engine works through this seam alone; nothing above it may assume lazy tensors, a process
    group, or a particular device.
    """

    name: str
    device: torch.device
    rank: int = 0  # among input processes
    world_size: int = 1
    local_devices: int = 1  # that this process's part of a batch is dealt to
    group: Group | None = None
    scaler: torch.amp.GradScaler | None = None
    mean_dtype = torch.float64  # the mean of equal float32 numbers is that number, to the bit

    def __init__(self, section: RuntimeSection) -> None:
        self.section = section
        self.current_span = ""
        if section.num_threads:
            torch.set_num_threads(section.num_threads)
        self._pending: list[tuple[Callable[..., None], tuple[Any, ...], Tensor]] = []
        self._declared_reads = 0
        self._profile: torch.profiler.profile | None = None

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes what is written once for all."""
        return self.rank == 0

    @property
    def wants_patches(self) -> bool:
        """Whether models are rewritten in plain operations, which its compiler likes best."""
        return False

    @property
    def fp32_weight_gradients(self) -> bool:
        """Whether products that give weight gradients must do so in float32: they are summed so."""
        return False

    @property
    def reduce_dtype(self) -> torch.dtype:
        """In which gradients are summed over devices."""
        return _DTYPES[self.section.reduce_dtype]

    @property
    def device_count(self) -> int:
        """Devices that a global batch is dealt to."""
        return self.world_size * self.local_devices

    @classmethod
    def launch(cls, section: RuntimeSection, worker: Callable[..., Any], *args: Any) -> int:
        """Run `worker(runtime, *args)` on every replica of this runtime; gives the exit code."""
        runtime = cls(section)
        try:
            return worker(runtime, *args) or 0
        finally:
            runtime.close()

    def close(self) -> None:
        """Leave the other ranks."""
        if self.group is not None:
            self.group.leave()

    def make_deterministic(self) -> list[str]:
        """Choose operations that give the same bits each time.

        Returns:
          What else the same bits need here, and what cannot have them, for a person to read.
        """
        return ["the same bits need the same versions, kind of device and number of devices"]

    # ------------------------------------------------------------------ placing

    def prepare(self, module: nn.Module) -> nn.Module:
        """The module on the device, with rank zero's weights on every rank."""
        module.to(self.device)
        self.broadcast([*module.parameters(), *module.buffers()])
        return module

    def accelerate(self, module: nn.Module) -> nn.Module:
        """A placed model whose forward pass may be compiled or laid out for the device."""
        return module

    def prepare_objective(self, objective: Any, model: nn.Module, extra: nn.Module) -> Any:
        """The objective as the loop calls it: may begin to sum gradients in the backward pass."""
        return objective

    def checkpoint_block(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a block of a model that is computed again in the backward pass."""
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)

    def scan_blocks(self, blocks: Sequence[nn.Module], inputs: Tensor) -> Tensor:
        """Run equal blocks one after the other as one compiled loop, where there is one."""
        for block in blocks:
            inputs = block(inputs)
        return inputs

    def rehearse(self, model: nn.Module, images: Tensor) -> None:
        """Let a model be traced before step 0, where tracing itself leaves something behind.

        Args:
          images: host, [B, C, H, W] float: this rank's part of a micro-batch.
        """
        return

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Create the optimizer's state before step 0, so that every step is alike.

        A step with zero gradients makes the state; parameters and state are then put back.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        saved = [p.detach().clone() for p in parameters]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for parameter, value in zip(parameters, saved, strict=True):
                parameter.copy_(value)
        _reset_state(optimizer)
        self.finish_step()

    def upload(self, values: Sequence[float]) -> Tensor:
        """Host numbers as one float32 vector on the device: data, never constants of a graph."""
        return torch.tensor(values, dtype=torch.float32).to(self.device)

    def optimizer_arguments(self, optimizer_name: str) -> dict[str, Any]:
        """Arguments that make this optimizer fast and steady on this device."""
        return {}

    def set_hyperparameters(
        self, optimizer: torch.optim.Optimizer, lrs: Sequence[float], decays: Sequence[float]
    ) -> None:
        """Give each parameter group its learning rate and weight decay of this step."""
        for group, lr, decay in zip(optimizer.param_groups, lrs, decays, strict=True):
            group["lr"] = lr
            group["weight_decay"] = decay

    # ------------------------------------------------------------------ the step

    @contextlib.contextmanager
    def step(self, seed: int, step: int) -> Iterator[None]:
        """Around one optimizer step: seeds the device before it, finishes the step after it."""
        self.seed(seed, step)
        yield
        self.finish_step()

    @abstractmethod
    def seed(self, seed: int, step: int) -> None:
        """Seed the device's generator from (seed, step, rank)."""

    def finish_step(self) -> None:
        """End of a step or of an evaluation batch: dispatch what has been recorded."""
        return

    def autocast(self) -> contextlib.AbstractContextManager:
        """Compute matmuls in `runtime.precision`."""
        if self.section.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=_DTYPES[self.section.precision])

    def prefetch(self, batches: Iterable[Any], depth: int = 2) -> Feeder:
        """Batches moved to the device by a thread, `depth` ahead; its errors reach the caller."""
        return Feeder(batches, self.place, depth)

    def place(self, batch: Any) -> Any:
        """A host batch on the device; its values of the step are whole on every device."""
        return batch.map(self.to_device, self.replicate)

    def split(self, batch: Any, parts: int) -> list[Any]:
        """Micro-batches of a placed batch, each on all devices that the batch is dealt to."""
        return batch.split(parts, self.local_devices)

    def to_device(self, tensor: Tensor) -> Tensor:
        """A host tensor on the device; its first axis is dealt out where there are several."""
        return tensor.to(self.device)

    def replicate(self, tensor: Tensor) -> Tensor:
        """A host tensor, alike on all ranks, as a whole on every device."""
        return self.to_device(tensor)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Gradients of a micro-batch; `last` allows communication between ranks to begin."""
        loss.backward()

    def keep_gradients_apart(self, module: nn.Module) -> None:
        """Have micro-batches' gradients added up over devices once; nothing to do on one device."""
        return

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Mean of the gradients over ranks; nothing to do on one rank."""
        return

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Take a gradient scaler's factor out; nothing to do without a scaler."""
        return

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Apply the gradients and drop them, so that they are no outputs of the step."""
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    # ------------------------------------------------------------------ looking on

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """A named stretch of the loop, as traces and a watchdog see it."""
        before, self.current_span = self.current_span, name
        with self.annotate(name):
            yield
        self.current_span = before

    def annotate(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """A name in the trace for what happens inside."""
        return torch.profiler.record_function(name)

    def start_trace(self, folder: Path) -> None:
        """Begin to record what host and device do."""
        self._profile = torch.profiler.profile(
            on_trace_ready=torch.profiler.tensorboard_trace_handler(
                str(folder), worker_name=f"rank_{self.rank}"
            )
        )
        self._profile.start()

    def stop_trace(self) -> None:
        """End the recording and write it, readable by TensorBoard and Perfetto."""
        self._profile.stop()

    # ------------------------------------------------------------------ other ranks

    def reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks."""
        return tensor if self.group is None else self.group.add_up(tensor.clone())

    def reduce_mean(self, tensor: Tensor) -> Tensor:
        """Mean over ranks."""
        return tensor if self.world_size == 1 else self.reduce_sum(tensor) / self.world_size

    def sum_with_gradient(self, tensor: Tensor) -> Tensor:
        """Sum over ranks through which the backward pass goes: its gradient is summed, too."""
        return tensor if self.world_size == 1 else _SumOverRanks.apply(tensor, self)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Copy rank zero's values into every rank's tensors."""
        if self.group is not None:
            self.group.copy_first(tensors)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's host object, in order of ranks."""
        return [value] if self.group is None else self.group.gather(value)

    def broadcast_value(self, value: Any) -> Any:
        """Rank zero's host object."""
        return self.gather(value)[0]

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is up on any rank."""
        return any(self.gather(flag))

    def barrier(self, name: str) -> None:
        """Wait for all ranks."""
        if self.group is not None:
            self.group.barrier()

    @torch.no_grad()
    def average_buffers(self, module: nn.Module) -> None:
        """Mean over ranks of the float buffers, such as BatchNorm's running statistics."""
        floats = [b for b in module.buffers() if b.is_floating_point()]
        if self.world_size == 1 or not floats:
            return
        mean = self.reduce_mean(torch.cat([b.reshape(-1).to(self.mean_dtype) for b in floats]))
        for buffer, piece in zip(floats, mean.split([b.numel() for b in floats]), strict=True):
            buffer.copy_(piece.view(buffer.shape))

    def check_replicas(self, tensors: Mapping[str, Tensor], when: str) -> None:
        """Compare the ranks' tensors by checksum. # host read: start, evaluations and end

        Raises:
          ReplicaError: on every rank, if they differ.
        """
        if self.world_size == 1:
            return
        host = self.fetch_all(tensors)
        compare_checksums(self.gather({n: _sum_bytes(t) for n, t in host.items()}), when)

    # ------------------------------------------------------------------ host reads

    def fetch(self, tensor: Tensor) -> Tensor:
        """A copy in host memory: one declared host read, waits for the device."""
        self._declared_reads += 1
        return tensor.detach().cpu()

    def fetch_all(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Host copies of many tensors in one read."""
        self._declared_reads += 1
        return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}

    @torch.no_grad()
    def load(self, placed: Mapping[str, Tensor], host: Mapping[str, Tensor]) -> None:
        """Host tensors into placed ones, by name and in place."""
        for name, tensor in placed.items():
            tensor.copy_(host[name])

    def defer(self, function: Callable[..., None], *args: Any, scalars: Tensor) -> None:
        """Call `function(*args, host_scalars)` at the next `settle`, one step behind the device.

        The read then waits for a step that has a successor in flight, so the device never idles,
        and an error in `function` reaches the loop.
        """
        self._pending.append((function, args, scalars))

    def settle(self) -> None:
        """Carry out what was deferred. # host read: log steps only"""
        pending, self._pending = self._pending, []
        for function, args, scalars in pending:
            function(*args, self.fetch(scalars))

    @property
    @abstractmethod
    def rng_state(self) -> dict[str, Any]:
        """What a checkpoint must hold of the generators; empty where steps are seeded."""

    def counters(self) -> dict[str, int]:
        """Since the start: `graphs` compiled, undeclared `host_reads`, ops on the host."""
        return {"graphs": 0, "host_reads": 0, "host_ops": 0}

    def describe(self) -> dict[str, Any]:
        """Device facts for run.json."""
        return {"runtime": self.name, "device": str(self.device), "world_size": self.world_size}


class _SumOverRanks(torch.autograd.Function):
    """Sum over ranks; every rank's result depends on every rank's input, so gradients add up."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, runtime: Runtime) -> Tensor:
        ctx.runtime = runtime
        return runtime.reduce_sum(tensor.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.runtime.reduce_sum(gradient.contiguous()), None


def compare_checksums(sums: Sequence[Mapping[str, int]], when: str) -> None:
    """Refuse ranks whose checksums differ from those of most ranks (of rank 0 where it is even).

    Raises:
      ReplicaError: names the ranks, the moment and the first tensor.
    """
    kinds = [tuple(one.items()) for one in sums]
    usual = max(kinds, key=kinds.count)
    odd = [rank for rank, kind in enumerate(kinds) if kind != usual]
    if odd:
        mine, theirs = dict(usual), sums[odd[0]]
        names = [name for name in mine if theirs.get(name) != mine[name]]
        raise ReplicaError(
            f"the weights of rank {', '.join(map(str, odd))} differ from the others' {when}: "
            f"{len(names)} of {len(mine)} tensors, first {names[0] if names else 'a missing one'}"
        )


def _sum_bytes(tensor: Tensor) -> int:
    """CRC-32 of a host tensor's bytes."""
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def derive_seed(seed: int, step: int, rank: int) -> int:
    """A 31-bit seed that differs between runs, steps and ranks (SplitMix64's finaliser)."""
    mask = (1 << 64) - 1
    value = (
        seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB
    ) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return (value ^ (value >> 31)) & 0x7FFFFFFF


def _reset_state(optimizer: torch.optim.Optimizer) -> None:
    """Take an optimizer's fresh state back to its start: moments, steps and counters at zero."""
    for state in optimizer.state.values():
        for key, value in state.items():
            state[key] = _get_zero(value)
    for group in optimizer.param_groups:
        if "step" in group:
            group["step"] = _get_zero(group["step"])


def _get_zero(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.zero_()
    return type(value)(0) if isinstance(value, int | float) else value
