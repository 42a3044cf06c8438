"""Lets Pallas kernels be a TPU's custom calls in a program that is traced without a TPU."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from bill.children.jax_step import write_old_kernels
from models.delta.kernels import bridge as kernels_bridge
from models.delta.kernels import operators as kernels
from models.delta.rules import blocks
from models.patches import fused_attention

if TYPE_CHECKING:
    from torch import Tensor


@contextlib.contextmanager
def call_kernels(chip: str = "") -> Iterator[None]:
    """Let a program be a TPU's: kernels as custom calls, which a CPU interprets, and its loops.

    Args:
      chip: the TPU's generation, such as v5e, which says what layers compute by kernels where they
        may choose.
    """
    from torch_xla.experimental import custom_kernel

    users = (blocks, kernels, kernels_bridge, fused_attention)
    held = (
        [module.has_custom_calls for module in users],
        custom_kernel.trace_pallas,
        kernels.name_tpu,
    )
    for module in users:
        module.has_custom_calls = lambda: True
    kernels.name_tpu = functools.cache(lambda: chip)
    custom_kernel.trace_pallas = _lower_kernel
    try:
        yield
    finally:
        for module, before in zip(users, held[0], strict=True):
            module.has_custom_calls = before
        custom_kernel.trace_pallas, kernels.name_tpu = held[1:]


def _lower_kernel(
    kernel: Callable[..., object], *tensors: Tensor, **_: object
) -> tuple[str | None, list[Tensor]]:
    """Trace a kernel as PyTorch/XLA does on a TPU; return the custom call's text and inputs."""
    import jax
    from torch_xla.experimental import custom_kernel

    write_old_kernels()
    given = [custom_kernel.to_jax_shape_dtype_struct(x) for x in tensors]
    lowered = jax.jit(kernel).trace(*given).lower(lowering_platforms=("tpu",))
    return custom_kernel._extract_backend_config(lowered.compiler_ir()), list(tensors)
