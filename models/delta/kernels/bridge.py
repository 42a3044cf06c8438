"""From a Pallas kernel to a program of PyTorch/XLA, on one device and on a mesh.

On a TPU a kernel is a custom call, made of what jax lowers by PyTorch/XLA's own bridge. Elsewhere
the kernel is interpreted, and what jax lowers for that is XLA's own operations, which become part
of the program: slow, and the same numbers, so that a test runs all but the custom call.
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


@dataclass(frozen=True)
class Heads:
    """Where heads stand, which devices may have some of each, too.

    Attributes:
      count: what heads that belong together allow: those of keys, where values share them.
      given: the dimension of heads, of each tensor that a kernel reads.
      found: the same of what it gives.
    """

    count: int
    given: Sequence[int]
    found: Sequence[int]


def deal(
    run: Callable[..., Sequence[Tensor]],
    tensors: Sequence[Tensor],
    axes: Sequence[int],
    results: Sequence[int],
    heads: Heads | None = None,
) -> list[Tensor]:
    """What `run` gives of tensors, each device of a mesh its own examples, or its own heads.

    The partitioner knows nothing of a kernel, and would gather what it reads.

    Args:
      axes: the dimension of examples, of each tensor.
      results: the same of what `run` gives.
    """
    mesh = _get_mesh()
    share = mesh and share_out(mesh, tensors[0].shape[axes[0]], heads.count if heads else 1)
    if not share:
        return list(run(*tensors))
    from torch_xla.distributed import spmd

    of_given, of_found = [None] * len(axes), [None] * len(results)
    if heads is not None:
        of_given, of_found = heads.given, heads.found
    places = [_place(x, x_axes, share) for x, *x_axes in zip(tensors, axes, of_given, strict=True)]
    parts = [
        spmd.enable_manual_sharding(x.clone(), place, mesh=mesh).global_tensor
        for x, place in zip(tensors, places, strict=True)
    ]
    found = []
    for x, *x_axes in zip(run(*parts), results, of_found, strict=True):
        place = _place(x, x_axes, share)
        whole = _widen(x, place, mesh)
        one = spmd.disable_manual_sharding(x, place, whole, mesh=mesh)
        found.append(one.global_tensor)
    return found


def find_own(examples: int, heads: int) -> tuple[int, int] | None:
    """Of so many examples and heads those that one device computes by a kernel.

    None: a mesh deals out neither, and each device would compute the whole; `heads` is as in
    `Heads`.
    """
    mesh = _get_mesh()
    if mesh is None:
        return examples, heads
    share, sizes = share_out(mesh, examples, heads), mesh.shape()
    if share is None:
        return None
    of_examples, of_heads = (math.prod(sizes[name] for name in names) for names in share)
    return examples // of_examples, heads // of_heads


def _get_mesh() -> Mesh | None:
    """The run's mesh; none: there is one device."""
    import torch_xla.runtime as xr
    from torch_xla.distributed import spmd

    return spmd.get_global_mesh() if xr.is_spmd() else None


def share_out(mesh: Mesh, examples: int, heads: int) -> tuple[tuple[str, ...], ...] | None:
    """Axes of a mesh along which examples are dealt out, and those along which heads are.

    Each axis has examples where these divide, else heads; none: some axis has neither, and each
    device computes the whole.
    """
    of_examples, of_heads = [], []
    for name, size in mesh.shape().items():
        if examples % size == 0:
            of_examples, examples = [*of_examples, name], examples // size
        elif heads % size == 0:
            of_heads, heads = [*of_heads, name], heads // size
        else:
            return None
    return tuple(of_examples), tuple(of_heads)


def _place(
    x: Tensor, axes: Sequence[int | None], share: tuple[tuple[str, ...], ...]
) -> tuple[tuple[str, ...] | None, ...]:
    """The names of mesh axes of each dimension of x."""
    names = {axis: of_axis for axis, of_axis in zip(axes, share, strict=True) if of_axis}
    return tuple(names.get(one) for one in range(x.dim()))


def _widen(x: Tensor, place: Sequence[tuple[str, ...] | None], mesh: Mesh) -> torch.Size:
    sizes = mesh.shape()
    times = [math.prod(sizes[name] for name in names or ()) for names in place]
    return torch.Size(n * many for n, many in zip(x.shape, times, strict=True))


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
