"""`Runtime`: all that the engine may ask of a device and of the other ranks."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from utils.runtime.feeding import Feeder

if TYPE_CHECKING:
    from utils.config.sections import RuntimeSection


class Runtime(ABC):
    """A device, its rank among equals, and the few operations that differ between devices.

    The engine works through this seam alone; nothing above it may assume lazy tensors, a process
    group, or a particular device.
    """

    name: str
    device: torch.device
    rank: int = 0
    world_size: int = 1

    def __init__(self, section: RuntimeSection) -> None:
        self.section = section
        if section.num_threads:
            torch.set_num_threads(section.num_threads)
        self._pending: list[tuple[Callable[..., None], tuple[Any, ...], Tensor]] = []
        self._declared_reads = 0

    @classmethod
    def launch(cls, section: RuntimeSection, worker: Callable[..., None], *args: Any) -> None:
        """Run `worker(runtime, *args)` on every replica of this runtime."""
        worker(cls(section), *args)

    # ------------------------------------------------------------------ placing

    def prepare(self, module: nn.Module) -> nn.Module:
        """The module on the device, with rank zero's weights on every rank."""
        module.to(self.device)
        self.broadcast([*module.parameters(), *module.buffers()])
        return module

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
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def prefetch(self, batches: Iterable[Any], depth: int = 2) -> Feeder:
        """Batches moved to the device by a thread, `depth` ahead; its errors reach the caller."""
        return Feeder(batches, self.to_device, depth)

    def to_device(self, tensor: Tensor) -> Tensor:
        """A host tensor on the device."""
        return tensor.to(self.device)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Gradients of a micro-batch; `last` allows communication between ranks to begin."""
        loss.backward()

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

    # ------------------------------------------------------------------ other ranks

    def reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks."""
        return tensor

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Copy rank zero's values into every rank's tensors."""
        return

    def barrier(self, name: str) -> None:
        """Wait for all ranks."""
        return

    # ------------------------------------------------------------------ host reads

    def fetch(self, tensor: Tensor) -> Tensor:
        """A copy in host memory: one declared host read, waits for the device."""
        self._declared_reads += 1
        return tensor.detach().cpu()

    def fetch_all(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Host copies of many tensors in one read."""
        self._declared_reads += 1
        return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}

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
