"""TPU chips by TorchTPU, PyTorch's own device `tpu`; or its stand-in on the CPU."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from utils.config.execution import RuntimeSection
from utils.endings import GraphBudgetError
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.runtime.base import DTYPES, B, Numbers, Runtime, Task, derive_seed
from utils.runtime.graph_updates import GraphUpdates
from utils.runtime.instruments import Instruments
from utils.runtime.native import overlap_sums
from utils.runtime.processes.shards import join, split
from utils.runtime.start import get_planned_size
from utils.runtime.tpu import standin
from utils.runtime.tpu.ranks import TpuRanks, join_group
from utils.runtime.tpu.start import set_compile_cache
from utils.runtime.updates import Updates
from utils.torch_types import ModuleT, P, T

# Products of float32 tensors: one bf16 pass, three, or six.
_PRECISIONS = {"default": "medium", "high": "high", "highest": "highest"}
# Steps in which operations may meet shapes that they have not been compiled for.
_WARMUP_STEPS = 2
# Of TorchTPU's errors where it may not compile: of a whole step at once, of an operation's result
# when it is read.
_REFUSALS = ("no more compilation should happen", "argument is in a failed state")


class TpuInstruments(Instruments):
    """Peak memory of a chip; on the stand-in the programs that ran since the last reading."""

    _executions = 0

    def read_device(self) -> dict[str, float]:
        if not standin.is_requested():
            return super().read_device()
        before, self._executions = self._executions, standin.read_counts()["executions"]
        return {"executions": self._executions - before}

    def get_peak_gib(self) -> float | None:
        if standin.is_requested():
            return None
        return torch.accelerator.max_memory_allocated(self._runtime.device) / 2**30


class _ProgramUpdates(GraphUpdates):
    """Updates in which the optimizer gets its rates within the program of the step.

    Numbers that the optimizer keeps on the host would be constants of the program: they are refused
    where the step is one program.
    """

    def __init__(self, runtime: TpuRuntime) -> None:
        super().__init__(runtime)
        self._is_program = runtime.section.compile
        self._host_decays: list[float] | None = None
        self._decays: Sequence[Tensor] | None = None

    def get_arguments(self, optimizer_name: str) -> dict[str, bool]:
        if self._is_program and optimizer_name in ("sgd", "momentum"):
            return {"foreach": False}
        return super().get_arguments(optimizer_name)

    def _takes_rates(self, optimizer: torch.optim.Optimizer) -> bool:
        is_sgd = self._is_program and isinstance(optimizer, torch.optim.SGD)
        return is_sgd or super()._takes_rates(optimizer)

    def set_hyperparameters(
        self, optimizer: torch.optim.Optimizer, lrs: Sequence[float], decays: Sequence[float]
    ) -> Tensor | None:
        rates = super().set_hyperparameters(optimizer, lrs, decays)
        if not self._is_program:
            return rates
        if rates is None:
            raise UserError(
                "runtime.compile (True) on 'tpu' is not supported with "
                f"{type(optimizer).__name__}, which keeps its learning rate on the host; use "
                "optim.name adamw, or leave runtime.compile out"
            )
        if not _decays_first(optimizer) and self._host_decays not in (None, list(decays)):
            raise UserError(
                f"runtime.compile (True) on 'tpu' with {type(optimizer).__name__} is not supported "
                "with a weight decay that changes; use optim.name adamw, remove "
                "optim.weight_decay_end, or leave runtime.compile out"
            )
        self._host_decays = list(decays)
        return rates

    def _list(
        self, optimizer: torch.optim.Optimizer, lrs: Sequence[float], decays: Sequence[float]
    ) -> Sequence[float]:
        is_data = self._is_program and _decays_first(optimizer)
        return [*lrs, *decays] if is_data else lrs

    def _hold_rates(self, optimizer: torch.optim.Optimizer, rates: Tensor) -> Tensor | None:
        return rates

    def place_rates(self, optimizer: torch.optim.Optimizer, rates: Tensor | None) -> None:
        super().place_rates(optimizer, rates)
        if rates is None:
            return
        groups = optimizer.param_groups
        if len(rates) > len(groups):
            self._decays = rates[len(groups) :].unbind()
        if isinstance(optimizer, torch.optim.SGD):
            for group in groups:  # only of such a rate SGD reads no number
                group["lr"] = group["lr"].detach().requires_grad_()

    @torch.no_grad()
    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._decays is None:
            super()._step(optimizer)
            return
        groups = optimizer.param_groups
        on_host = [group["weight_decay"] for group in groups]
        for group, decay in zip(groups, self._decays, strict=True):
            moved = [p for p in group["params"] if p.grad is not None] if group["decays"] else []
            for weight in moved:
                weight.mul_(1 - group["lr"] * decay)
            group["weight_decay"] = 0.0
        super()._step(optimizer)
        for group, decay in zip(groups, on_host, strict=True):
            group["weight_decay"] = decay


def _decays_first(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step begins by weights times 1 - lr * decay: it can be done before it."""
    corrected = any(group.get("corrected_weight_decay") for group in optimizer.param_groups)
    return type(optimizer).__name__ in ("AdamW", "AdamWLegacy", "NAdamW") and not corrected


class TpuRuntime(Runtime):
    """One process with one device.

    As it is, each operation is a program, compiled when it is first met; with `runtime.compile` a
    training step is one program. `graphs` counts the programs that training steps compile: with
    `runtime.compile` all of them, else those after the first steps, in which each operation is met.
    """

    name = "tpu"

    def __init__(self, section: RuntimeSection) -> None:
        set_compile_cache(section)
        open_device()
        # pyrefly: ignore[read-only]  # torch's stub makes a descriptor of every torch.device
        self.device = torch.device("tpu")
        super().__init__(section)
        torch.set_float32_matmul_precision(_PRECISIONS[section.matmul_precision])
        self._reduce_dtype = DTYPES[section.reduce_dtype]
        self._uses_ddp = bool(section.overlap) and get_planned_size() > 1
        if get_planned_size() > 1:
            self.ranks = TpuRanks(
                self, join_group(section), self._reduce_dtype, sums_in_backward=self._uses_ddp
            )
            self.ranks.hold_parts = section.parallel == "fsdp"
        elif section.parallel == "fsdp":
            raise UserError(
                "runtime.parallel ('fsdp') splits weights over processes, and this run has one; "
                "set runtime.num_processes, or use process"
            )
        self._steps = self._graphs = 0
        self._is_refused, self._budget = False, section.graph_budget
        self._transfers_before = _count_transfers()

    def _create_updates(self) -> Updates:
        return _ProgramUpdates(self)

    def _create_instruments(self) -> Instruments:
        return TpuInstruments(self)

    @property
    def wants_patches(self) -> bool:
        return True

    def accelerate(self, module: ModuleT) -> ModuleT:
        # A step is compiled as a whole, so nothing is compiled here.
        return split(module, self._reduce_dtype) if self.section.parallel == "fsdp" else module

    def prepare_task(self, task: Task, model: nn.Module, loss_modules: nn.Module) -> Task:
        if not self._uses_ddp:
            return task
        # To find them, DDP needs host memory that the stand-in does not have.
        finds_unused = not standin.is_requested()
        return overlap_sums(
            task, model, loss_modules, self._reduce_dtype, finds_unused=finds_unused
        )

    def compile_step(
        self, function: Callable[[B, Numbers], T], graph_budget: int
    ) -> Callable[[B, Numbers], T]:
        self._budget = graph_budget
        if not self.section.compile:
            return function
        if self.ranks.size > 1 and standin.is_requested():
            raise UserError(
                f"runtime.compile (True) is not supported with {self.ranks.size} processes on the "
                "stand-in of a TPU, whose sums leave the device; leave one of them out"
            )
        from utils.runtime.tpu.program import StepProgram

        return StepProgram(function)

    def checkpoint_block(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if not self.section.compile:
            return super().checkpoint_block(function, *args, **kwargs)
        from utils.runtime.tpu.program import recompute_apart

        return super().checkpoint_block(recompute_apart(function), *args, **kwargs)

    @contextlib.contextmanager
    def step(self, seed: int, step: int) -> Iterator[None]:
        is_first = self._steps < _WARMUP_STEPS
        before = self._count_programs(wait=is_first)
        self._is_refused = not is_first and self._graphs >= self._budget
        get_api()._set_cache_only(self._is_refused)
        try:
            with self._explain_refusal(), super().step(seed, step):
                yield
        finally:
            get_api()._set_cache_only(False)
        compiled = self._count_programs(wait=is_first) - before
        self._graphs += compiled if self.section.compile or not is_first else 0
        self._steps += 1

    @contextlib.contextmanager
    def _explain_refusal(self) -> Iterator[None]:
        """Raise a GraphBudgetError for TorchTPU's own error of a program that was refused."""
        try:
            yield
        except RuntimeError as error:
            if self._is_refused and any(text in str(error) for text in _REFUSALS):
                raise GraphBudgetError(
                    "a training step needs a program that is not compiled yet, after "
                    f"runtime.graph_budget ({self._budget}) was reached; a shape or a "
                    "Python number changes from step to step, or the budget is too low"
                ) from error
            raise

    def _count_programs(self, *, wait: bool) -> int:
        """Count compiled programs; without `wait` those of operations may be counted later."""
        if wait:
            torch.accelerator.synchronize()
        return get_api()._get_cache_misses()

    def _seed(self, seed: int, step: int) -> None:
        value = derive_seed(seed, step, self.ranks.index)
        get_api().manual_seed(value)
        torch.default_generator.manual_seed(value)

    def fetch(self, tensor: Tensor) -> Tensor:
        with self._explain_refusal():
            return super().fetch(tensor)

    def fetch_all(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        on_device = sum(tensor.device.type == self.name for tensor in tensors.values())
        self._declared_reads += on_device
        return {name: join(tensor.detach()).cpu().clone() for name, tensor in tensors.items()}

    def counters(self) -> dict[str, int]:
        reads = 0
        if standin.is_requested():  # TorchTPU itself does not count them
            reads = _count_transfers() - self._transfers_before - self._declared_reads
        return {"graphs": self._graphs, "host_reads": reads, "host_ops": 0}

    def describe(self) -> JsonObject:
        hardware = "CPU" if standin.is_requested() else get_api().get_device_name()
        return {**super().describe(), "hardware": hardware}


def _count_transfers() -> int:
    return standin.read_counts()["transfers"] - standin.SUMS["transfers"]


def get_api() -> Any:
    """Return `torch.tpu`, which torch has once the device is open."""
    return sys.modules["torch.tpu"]


@functools.cache
def open_device() -> None:
    """Load torch_tpu and open this process's device, without the lines that both print."""
    if standin.is_requested():
        if "torch_tpu" in sys.modules:
            raise UserError(
                f"{standin.VARIABLE} (cpu) comes too late: importing torch has loaded libtpu; set "
                "TORCH_DEVICE_BACKEND_AUTOLOAD=0 in the environment"
            )
        standin.install()
    # With a size of more than one, the driver would wait for a process on each chip.
    size = os.environ.pop("WORLD_SIZE", None) if standin.is_requested() else None
    warnings.filterwarnings("ignore", message="<TorchTpu/")
    with contextlib.redirect_stderr(io.StringIO()):
        from torch_tpu import _loader
        from torch_tpu._internal.utils import hardware

        if standin.is_requested():
            hardware.get_tpu_device_count = lambda: 1
        _loader.load()
    if standin.is_requested():
        # Fused attention is a kernel that only chips have.
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch._C._set_sdp_use_overrideable(False)
    torch.zeros(1, device="tpu").cpu()
    if size is not None:
        os.environ["WORLD_SIZE"] = size
