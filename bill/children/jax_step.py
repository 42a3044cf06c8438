"""What the yardsticks in JAX share: a child's request and facts, shapes of weights, AdamW.

Imports of JAX stand in functions, because the platform is chosen first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from utils.json_types import JsonObject

# An array of JAX, a tree of them or a function of them: JAX, which has their types, is imported in
# functions alone.
Array = Any

_BETAS, _EPS = (0.9, 0.999), 1e-8


def run_child(argv: list[str], run: Callable[[JsonObject], JsonObject]) -> int:
    """Run a child on the request in a file, and write its facts beside it; return the exit code."""
    path = Path(argv[0])
    request = json.loads(path.read_text(encoding="utf-8"))
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={request.get('devices', 1)}"
    os.environ.pop("PJRT_DEVICE", None)
    facts = run(request)
    (path.parent / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
    return 0


def write_old_kernels() -> None:
    """Have JAX write kernels in the form that its own libtpu reads.

    jax 0.7.1 writes a newer one, unless it sees a TPU.
    """
    from jax._src import tpu_custom_call

    def get_version(_: Array) -> int:
        return 7

    tpu_custom_call.get_ir_version = get_version


def describe_shapes(shapes: Array, leaf: Callable[[tuple[int, ...]], Array]) -> Array:
    """Describe the arrays of a tree whose leaves are shapes."""
    import jax

    def is_shape(node: Array) -> bool:
        return isinstance(node, tuple)

    return jax.tree.map(leaf, shapes, is_leaf=is_shape)


def export_step(step: Callable[..., Array], arguments: tuple[Array, ...], path: str) -> int:
    """Write a step as StableHLO for TPUs; return how many arguments its first results replace.

    Args:
      arguments: weights, their two moments, and the rest.
    """
    import jax
    from jax import export

    exported = export.export(jax.jit(step), platforms=["tpu"])(*arguments)
    Path(path).write_bytes(exported.mlir_module_serialized)
    return 3 * len(jax.tree.leaves(arguments[0]))


def apply_adamw(
    state: tuple[Array, Array, Array],
    gradients: Array,
    lr: Array,
    number: Array,
    decay: float,
) -> tuple[Array, ...]:
    """Return weights and both moments after a step of AdamW; vectors do not decay.

    Args:
      number: of the step, from 1.
    """
    import jax
    import jax.numpy as jnp

    corrections = [1.0 - beta**number for beta in _BETAS]

    def update(weight: Array, first: Array, second: Array, gradient: Array) -> Array:
        first = _BETAS[0] * first + (1 - _BETAS[0]) * gradient
        second = _BETAS[1] * second + (1 - _BETAS[1]) * gradient * gradient
        ratio = (first / corrections[0]) / (jnp.sqrt(second / corrections[1]) + _EPS)
        own_decay = decay if weight.ndim > 1 else 0.0
        return weight - lr * (ratio + own_decay * weight), first, second

    leaves, form = jax.tree.flatten(state[0])
    others = (jax.tree.leaves(tree) for tree in (*state[1:], gradients))
    updated = [update(*row) for row in zip(leaves, *others, strict=True)]
    return tuple(jax.tree.unflatten(form, column) for column in zip(*updated, strict=True))
