"""From a Pallas kernel to a program of PyTorch/XLA, on one device and on a mesh.

On a TPU a kernel is a custom call, made of what jax lowers by PyTorch/XLA's own bridge. Elsewhere
the kernel is interpreted, and jax lowers it to XLA's own operations, which become part of the
program: slow, and the same numbers, so that a test runs all but the custom call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from utils.runtime.xla.kernels import has_custom_calls

if TYPE_CHECKING:
    from types import FunctionType as Kernel  # a plan and arrays -> arrays

    from _typeshed import DataclassInstance
    from torch_xla.distributed.spmd import Mesh

# A tensor that a kernel returns: its sizes, and its type.
Result = tuple[Sequence[int], torch.dtype]


def run_kernel(
    kernel: Kernel, plan: DataclassInstance, tensors: Sequence[Tensor], results: Sequence[Result]
) -> list[Tensor]:
    """Run `kernel(plan, *arrays)`, one Pallas call, on tensors of an XLA device.

    `plan` is hashable, with a field `interpret`; `results` are in the kernel's order.
    """
    if has_custom_calls():
        output = _lower_for_tpu(kernel, plan)(*tensors, use_cache=True, results=tuple(results))
        return list(output) if isinstance(output, tuple) else [output]
    shapes = tuple((tuple(x.shape), x.dtype) for x in tensors)
    return list(_lower_interpreted(kernel, plan, shapes)(list(tensors)))


@dataclass(frozen=True)
class Heads:
    """The dimensions of heads, which a mesh may deal out to its devices, too."""

    count: int  # heads that are dealt out: those of keys, where values share them
    given: Sequence[int]  # the dimension of heads, of each tensor that a kernel reads
    found: Sequence[int]  # the same of its results


def deal(
    run: Callable[..., Sequence[Tensor]],
    tensors: Sequence[Tensor],
    axes: Sequence[int],
    results: Sequence[int],
    heads: Heads | None = None,
) -> list[Tensor]:
    """Run a function of tensors on each device's own examples of a mesh, or its own heads.

    XLA's partitioner cannot divide a kernel, and would gather its inputs. `axes` has the dimension
    of examples of each tensor, `results` that of each result.
    """
    mesh = _get_mesh()
    if mesh is None:
        return list(run(*tensors))
    share = share_out(mesh, tensors[0].shape[axes[0]], heads.count if heads else 1)
    if share is None:
        return list(run(*tensors))
    from torch_xla.distributed import spmd

    of_given, of_results = [None] * len(axes), [None] * len(results)
    if heads is not None:
        of_given, of_results = heads.given, heads.found
    parts = []
    for x, *x_axes in zip(tensors, axes, of_given, strict=True):
        spec = _name_axes(x, x_axes, share)
        # A copy, because torch_xla 2.9 annotates the sharding of its argument in place.
        parts.append(spmd.enable_manual_sharding(x.clone(), spec, mesh=mesh).global_tensor)
    wholes, sizes = list[Tensor](), _get_sizes(mesh)
    for x, *x_axes in zip(run(*parts), results, of_results, strict=True):
        spec = _name_axes(x, x_axes, share)
        times = [math.prod(sizes[name] for name in names or ()) for names in spec]
        shape = torch.Size(n * many for n, many in zip(x.shape, times, strict=True))
        wholes.append(spmd.disable_manual_sharding(x, spec, shape, mesh=mesh).global_tensor)
    return wholes


def find_own(examples: int, heads: int) -> tuple[int, int] | None:
    """Return the examples and heads that one device of the run's mesh computes by a kernel.

    None if a mesh deals out neither: each device would compute all. `heads` is as in `Heads`.
    """
    mesh = _get_mesh()
    if mesh is None:
        return examples, heads
    share, sizes = share_out(mesh, examples, heads), _get_sizes(mesh)
    if share is None:
        return None
    of_examples, of_heads = (math.prod(sizes[name] for name in names) for names in share)
    return examples // of_examples, heads // of_heads


def _get_mesh() -> Mesh | None:
    """Return the run's mesh; None on one device."""
    import torch_xla.runtime as xr
    from torch_xla.distributed import spmd

    return spmd.get_global_mesh() if xr.is_spmd() else None


def _get_sizes(mesh: Mesh) -> dict[str, int]:
    """Return the devices along each axis; torch_xla's annotation names axes by numbers."""
    sizes: Any = mesh.shape()
    return sizes


def share_out(mesh: Mesh, examples: int, heads: int) -> tuple[tuple[str, ...], ...] | None:
    """Return the axes of a mesh along which examples are dealt out, and those for heads.

    Each axis has examples where these divide, else heads; None if neither divide by some axis, so
    that each device computes the whole.
    """
    of_examples: tuple[str, ...] = ()
    of_heads: tuple[str, ...] = ()
    for name, size in _get_sizes(mesh).items():
        if examples % size == 0:
            of_examples, examples = (*of_examples, name), examples // size
        elif heads % size == 0:
            of_heads, heads = (*of_heads, name), heads // size
        else:
            return None
    return of_examples, of_heads


def _name_axes(
    x: Tensor, axes: Sequence[int | None], share: tuple[tuple[str, ...], ...]
) -> tuple[tuple[str, ...] | None, ...]:
    """Name the mesh axes of each dimension of x."""
    names = {axis: of_axis for axis, of_axis in zip(axes, share, strict=True) if of_axis}
    return tuple(names.get(dim) for dim in range(x.dim()))


# Cached, because the bridge caches its lowering under the function that it is given.
@cache
def _lower_for_tpu(
    kernel: Kernel, plan: DataclassInstance
) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    from torch_xla.experimental.custom_kernel import jax_import_guard, make_kernel_from_pallas

    jax_import_guard()
    function = partial(kernel, plan)

    def call(*tensors: Tensor, use_cache: bool, results: tuple[Result, ...]) -> Any:
        def describe(*_: Tensor) -> list[Result]:
            return list(results)

        return make_kernel_from_pallas(function, describe)(*tensors, use_cache=use_cache)

    return call


@cache
def _lower_interpreted(
    kernel: Kernel, plan: DataclassInstance, shapes: tuple[Result, ...]
) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    from torch_xla.core.xla_builder import computation_from_module_proto, xla_computation_as_func
    from torch_xla.experimental.custom_kernel import convert_torch_dtype_to_jax, jax_import_guard

    jax_import_guard()
    import jax

    given = [
        jax.ShapeDtypeStruct(shape, convert_torch_dtype_to_jax(dtype)) for shape, dtype in shapes
    ]
    function = partial(kernel, replace(plan, interpret=True))
    # XLA is given all tensors, so none may be dropped as unused.
    lowered = jax.jit(function, keep_unused=True).trace(*given).lower(lowering_platforms=("cpu",))
    module = lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()
    name = f"delta_{kernel.__name__}"
    return xla_computation_as_func(computation_from_module_proto(name, module), name)
