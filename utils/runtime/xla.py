"""PyTorch/XLA through PJRT: TPU chips, or the CPU where there is none."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from utils.errors import UserError
from utils.runtime.base import Runtime, derive_seed

if TYPE_CHECKING:
    from utils.config.sections import RuntimeSection

# Optimizers whose maths take a learning rate that lives on the device: any value, 0 and 1
# included, is then data of one graph. The others take Python floats.
_DEVICE_LR = ("adamw", "adam", "nadam", "adamax")


class XlaRuntime(Runtime):
    """One process for each chip; on the CPU one process in place."""

    name = "xla"

    def __init__(self, section: RuntimeSection) -> None:
        super().__init__(section)
        import torch_xla
        import torch_xla.core.xla_model as xm
        import torch_xla.debug.metrics as metrics
        import torch_xla.runtime as xr

        self._xla, self._xm, self._metrics = torch_xla, xm, metrics
        self.device = torch_xla.device()
        self.rank, self.world_size = xr.global_ordinal(), xr.world_size()
        self._hardware = xr.device_type()
        self._counted_before = self._count()

    @classmethod
    def launch(cls, section: RuntimeSection, worker: Callable[..., None], *args: Any) -> None:
        """In place on the CPU; by `torch_xla.launch`, a process for each chip, on a TPU."""
        import torch_xla

        in_place = os.environ.get("PJRT_DEVICE") == "CPU"
        torch_xla.launch(_run_replica, args=(section, worker, args), debug_single_process=in_place)

    def seed(self, seed: int, step: int) -> None:
        # Every sync advances the device's generator, so it is set just before the step.
        self._xm.set_rng_state(derive_seed(seed, step, self.rank), device=str(self.device))
        torch.manual_seed(derive_seed(seed, step, self.rank))

    def finish_step(self) -> None:
        self._xla.sync()

    def to_device(self, tensor: Tensor) -> Tensor:
        # Not `tensor.to`: it makes an empty device tensor first and copies into it. A sync of the
        # main thread between the two would take that half-made tensor for an output of the step and
        # compile another graph.
        return self._xm.send_cpu_data_to_device([tensor], self.device)[0]

    def optimizer_arguments(self, optimizer_name: str) -> dict[str, Any]:
        if optimizer_name in _DEVICE_LR:
            return {"capturable": True, "foreach": False}
        return {}

    def set_hyperparameters(
        self, optimizer: torch.optim.Optimizer, lrs: Sequence[float], decays: Sequence[float]
    ) -> None:
        super().set_hyperparameters(optimizer, lrs, decays)
        if not optimizer.defaults.get("capturable"):
            return
        # A zero-dimensional host tensor of 0 or 1 would be baked into the graph; a slice of an
        # uploaded vector is always data.
        values = self.upload(lrs)
        for position, group in enumerate(optimizer.param_groups):
            group["lr"] = values[position]

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        if self.world_size > 1:
            self._xm.reduce_gradients(optimizer)

    def reduce_sum(self, tensor: Tensor) -> Tensor:
        if self.world_size == 1:
            return tensor
        return self._xm.all_reduce(self._xm.REDUCE_SUM, tensor)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        if self.world_size > 1:
            self._xm.collective_broadcast(list(tensors))
        self._xla.sync()

    def barrier(self, name: str) -> None:
        if self.world_size > 1:
            self._xm.rendezvous(name)

    def fetch_all(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        names = list(tensors)
        on_device = [n for n in names if tensors[n].device.type == "xla"]
        host = dict(tensors)
        if on_device:
            self._declared_reads += 1
            values = self._xla._XLAC._xla_get_cpu_tensors([tensors[n].detach() for n in on_device])
            host.update(zip(on_device, values, strict=True))
        return {name: host[name].detach().clone() for name in names}

    @property
    def rng_state(self) -> dict[str, Any]:
        return {}

    def counters(self) -> dict[str, int]:
        now = self._count()
        gained = {name: now[name] - self._counted_before[name] for name in now}
        gained["host_reads"] -= self._declared_reads
        return gained

    def _count(self) -> dict[str, int]:
        """What torch_xla has counted in this process, earlier runtimes included."""
        transfers = self._metrics.metric_data("TransferFromDeviceTime")
        fallbacks = [n for n in self._metrics.counter_names() if n.startswith("aten::")]
        return {
            "graphs": self._metrics.counter_value("UncachedCompile") or 0,
            "host_reads": transfers[0] if transfers else 0,
            "host_ops": sum(self._metrics.counter_value(name) or 0 for name in fallbacks),
        }

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "hardware": self._hardware}


def _run_replica(_: int, section: RuntimeSection, worker: Callable[..., Any], args: tuple) -> None:
    if section.device == "xla" and os.environ.get("PJRT_DEVICE") not in (None, "CPU", "TPU"):
        raise UserError(
            f"PJRT_DEVICE ({os.environ['PJRT_DEVICE']!r}) contradicts runtime.device='xla'; unset "
            "it, or set it to TPU or CPU"
        )
    worker(XlaRuntime(section), *args)
