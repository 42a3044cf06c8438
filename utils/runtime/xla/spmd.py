"""One process for each host and one mesh over all devices, partitioned by XLA.

Every tensor is a global array. The batch is split along `data` and `fsdp`, parameters are
replicated along `data` and, with `runtime.mesh_fsdp`, sharded along `fsdp`; sums over examples are
sums over all devices, BatchNorm's statistics included. With `runtime.mesh_context` language models
split the tokens of each example along a third axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from utils.config.execution import RuntimeSection
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.runtime.graph_updates import GraphUpdates
from utils.runtime.mesh_gradients import split_gradients
from utils.runtime.processes.ranks import Ranks
from utils.runtime.processes.sequence import count_sequence_parts, set_sequence_axis
from utils.runtime.updates import Updates
from utils.runtime.xla.ranks import MeshRanks, join_hosts
from utils.runtime.xla.runtime import XlaRuntime
from utils.torch_types import ModuleT

_DATA, _FSDP, _CONTEXT = "data", "fsdp", "context"
_BATCH = (_DATA, _FSDP)


def get_mesh_shape(section: RuntimeSection, devices: int) -> tuple[int, ...]:
    """Return the devices along (data, fsdp[, context]); UserError if keys and devices differ."""
    fsdp, context = section.mesh_fsdp, section.mesh_context
    data = section.mesh_data or max(devices // (fsdp * context), 1)
    if data * fsdp * context != devices:
        last = f" x runtime.mesh_context ({context})" if context > 1 else ""
        raise UserError(
            f"runtime.mesh_data ({data}) x runtime.mesh_fsdp ({fsdp}){last} is "
            f"{data * fsdp * context}, but there are {devices} devices; change one of them, or "
            "CPU_NUM_DEVICES on the CPU"
        )
    return (data, fsdp, context) if context > 1 else (data, fsdp)


class _MeshUpdates(GraphUpdates):
    """Updates whose state has the layout of its parameters.

    `lay_out` maps (tensor of the state, parameter) to the same tensor in the right layout.
    """

    def __init__(self, device: XlaSpmdRuntime, lay_out: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(device)
        self._lay_out = lay_out

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        super().prepare(optimizer)
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.device.type == parameter.device.type:
                    state[key] = self._lay_out(value, parameter)
        self._device.finish_step()


class XlaSpmdRuntime(XlaRuntime):
    """All devices of the run in one mesh of (data, fsdp), and context if it is set."""

    def _create_updates(self) -> Updates:
        return _MeshUpdates(self, self._lay_out_state)

    @property
    def fp32_weight_gradients(self) -> bool:
        # The partitioner sums outputs of a product before they are cast to the weight's type.
        return self.section.reduce_dtype == "fp32"

    def _start_backend(self) -> None:
        import torch_xla.distributed.spmd as xs

        self._xs = xs
        self._xr.use_spmd()
        super()._start_backend()
        count = self._xr.global_runtime_device_count()
        shape = get_mesh_shape(self.section, count)
        self._mesh = xs.Mesh(np.arange(count), shape, (*_BATCH, _CONTEXT)[: len(shape)])
        set_sequence_axis(self.section.mesh_context, self._mark_sequence)
        # Kernels, which the partitioner cannot split, split their examples by it.
        xs.set_global_mesh(self._mesh)

    def _create_ranks(self) -> Ranks:
        hosts = self._xr.process_count()
        if hosts > 1 and count_sequence_parts() > 1:
            raise UserError(
                f"runtime.mesh_context ({self.section.mesh_context}) works on one host, and these "
                f"are {hosts}; remove it, or use runtime.mesh_fsdp"
            )
        devices = self._xr.global_runtime_device_count() // hosts
        self.local_devices = devices // count_sequence_parts()
        group = join_hosts(self.section) if hosts > 1 else None
        return MeshRanks(self, group, None if self.fp32_weight_gradients else torch.bfloat16)

    def prepare(self, module: ModuleT) -> ModuleT:
        module.to(self.device)
        for tensor in (*module.parameters(), *module.buffers()):
            self._xs.mark_sharding(tensor, self._mesh, self._get_partition(tensor.shape))
        self.finish_step()
        return module

    def tensor_to_device(self, tensor: Tensor) -> Tensor:
        if tensor.dim() == 1 and count_sequence_parts() > 1:
            # PyTorch/XLA 2.9 cannot shard a vector along only some of a mesh's axes.
            return self._replicate(tensor)
        return self._upload(tensor, (_BATCH, *[None] * (tensor.dim() - 1)), part=True)

    def _mark_sequence(self, x: Tensor, dim: int | None, batch: int) -> Tensor:
        """Shard a dimension of tokens or parts along `context`, and the examples."""
        partition: list[str | tuple[str, ...] | None] = [None] * x.dim()
        if x.shape[batch] % self.device_count == 0:
            partition[batch] = _BATCH
        if dim is not None:
            partition[dim] = _CONTEXT
        # Not `mark_sharding`: it refuses tensors that derive from a sharded one.
        return self._xs.annotate_custom_sharding(x, self._mesh, tuple(partition)).global_tensor

    def _lay_out_state(self, value: Tensor, parameter: Tensor) -> Tensor:
        """Upload a tensor of an optimizer's state in its parameter's layout, or replicated."""
        same = value.shape == parameter.shape
        partition = self._get_partition(value.shape) if same else (None,) * value.dim()
        return self._upload(value.cpu(), partition)

    def _replicate(self, tensor: Tensor) -> Tensor:
        return self._upload(tensor, (None,) * tensor.dim())

    def _upload(
        self,
        tensor: Tensor,
        partition: Sequence[str | tuple[str, ...] | None],
        *,
        part: bool = False,
    ) -> Tensor:
        """Upload a global array; `part`: this host has only its share of the first axis."""
        minibatch = part and self.ranks.size > 1
        spec = self._xs.ShardingSpec(self._mesh, tuple(partition), minibatch=minibatch)
        uploaded: Any = self._xm.send_cpu_data_to_device([tensor], self.device, spec)
        return uploaded[0]

    def _get_partition(self, shape: Sequence[int]) -> tuple[str | None, ...]:
        """Return the mesh axis of each dimension: `fsdp` for the largest one that it divides.

        Vectors (biases, norms) stay whole: they are small.
        """
        partition: list[str | None] = [None] * len(shape)
        fsdp = self.section.mesh_fsdp
        fitting = [d for d, size in enumerate(shape) if size % fsdp == 0 and size >= fsdp]
        if fsdp > 1 and fitting and len(shape) > 1:
            partition[max(fitting, key=lambda d: shape[d])] = _FSDP
        return tuple(partition)

    def keep_gradients_apart(self, module: nn.Module) -> None:
        # Not for sharded parameters: whole gradients on each device would not fit.
        if self.section.mesh_fsdp == 1:
            split_gradients(module.parameters(), self.device_count, self._shard_first_axis)

    def _shard_first_axis(self, tensor: Tensor) -> Tensor:
        self._xs.mark_sharding(tensor, self._mesh, (_BATCH, *[None] * (tensor.dim() - 1)))
        return tensor

    def describe(self) -> JsonObject:
        shape = dict(zip(self._mesh.axis_names or (), self._mesh.mesh_shape, strict=True))
        return {**super().describe(), "mesh": shape}
