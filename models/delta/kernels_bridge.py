"""From a Pallas kernel to a program of PyTorch/XLA, on one device and on a mesh.

On a TPU a kernel is a custom call, made of what jax lowers by PyTorch/XLA's own bridge. Elsewhere
the kernel is interpreted, and what jax lowers for that is XLA's own operations, which become part
of the program: slow, and the same numbers, so that a test runs all but the custom call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from utils.runtime.xla_kernels import has_custom_calls

if TYPE_CHECKING:
    from torch_xla.distributed.spmd import Mesh

# A tensor that a kernel gives: its sizes, and its type.
Result = tuple[Sequence[int], torch.dtype]


def run_kernel(
    kernel: Callable[..., Any], plan: Any, tensors: Sequence[Tensor], results: Sequence[Result]
) -> list[Tensor]:
    """What `kernel(plan, *arrays)` gives, one Pallas call, of tensors on an XLA device.

    Args:
      plan: hashable, with a field `interpret`.
      results: of the kernel, in order.
    """
    if has_custom_calls():
        found = _lower_for_tpu(kernel, plan)(*tensors, use_cache=True, results=tuple(results))
        return list(found) if isinstance(found, tuple) else [found]
    shapes = tuple((tuple(x.shape), x.dtype) for x in tensors)
    return list(_lower_interpreted(kernel, plan, shapes)(list(tensors)))


def deal(
    run: Callable[..., Sequence[Tensor]],
    tensors: Sequence[Tensor],
    axes: Sequence[int],
    results: Sequence[int],
) -> list[Tensor]:
    """What `run` gives of tensors, each device of a mesh its own examples.

    The partitioner knows nothing of a kernel, and would gather what it reads.

    Args:
      axes: the dimension of examples, of each tensor.
      results: the same of what `run` gives.
    """
    mesh = _get_mesh(tensors[0].shape[axes[0]])
    if mesh is None:
        return list(run(*tensors))
    from torch_xla.distributed import spmd

    parts = [
        spmd.enable_manual_sharding(x.clone(), _place(x, axis, mesh), mesh=mesh).global_tensor
        for x, axis in zip(tensors, axes, strict=True)
    ]
    return [
        spmd.disable_manual_sharding(
            x, _place(x, axis, mesh), _widen(x, axis, mesh), mesh=mesh
        ).global_tensor
        for x, axis in zip(run(*parts), results, strict=True)
    ]


def _get_mesh(examples: int) -> Mesh | None:
    """The run's mesh; none: there is one device, or the examples do not divide among them."""
    import torch_xla.runtime as xr
    from torch_xla.distributed import spmd

    mesh = spmd.get_global_mesh() if xr.is_spmd() else None
    return mesh if mesh is not None and examples % mesh.size() == 0 else None


def _place(x: Tensor, axis: int, mesh: Mesh) -> tuple[tuple[str, ...] | None, ...]:
    return tuple(tuple(mesh.axis_names) if one == axis else None for one in range(x.dim()))


def _widen(x: Tensor, axis: int, mesh: Mesh) -> torch.Size:
    return torch.Size(n * mesh.size() if one == axis else n for one, n in enumerate(x.shape))


@cache
def _lower_for_tpu(kernel: Callable[..., Any], plan: Any) -> Callable[..., Any]:
    """Kept, because the bridge keeps what it lowered under the function that it is given."""
    from torch_xla.experimental.custom_kernel import jax_import_guard, make_kernel_from_pallas

    jax_import_guard()
    return partial(_call_for_tpu, partial(kernel, plan), make_kernel_from_pallas)


def _call_for_tpu(
    function: Callable[..., Any],
    bridge: Callable[..., Any],
    *tensors: Tensor,
    use_cache: bool,
    results: tuple[Result, ...],
) -> Any:
    return bridge(function, lambda *given: list(results))(*tensors, use_cache=use_cache)


@cache
def _lower_interpreted(
    kernel: Callable[..., Any], plan: Any, shapes: tuple[Result, ...]
) -> Callable[..., Any]:
    from torch_xla.core.xla_builder import computation_from_module_proto, xla_computation_as_func
    from torch_xla.experimental.custom_kernel import convert_torch_dtype_to_jax, jax_import_guard

    jax_import_guard()
    import jax

    given = [
        jax.ShapeDtypeStruct(shape, convert_torch_dtype_to_jax(kind)) for shape, kind in shapes
    ]
    function = partial(kernel, replace(plan, interpret=True))
    lowered = jax.jit(function, keep_unused=True).trace(*given).lower(lowering_platforms=("cpu",))
    module = lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()
    name = f"delta_{kernel.__name__}"
    return xla_computation_as_func(computation_from_module_proto(name, module), name)
