"""Exports JAX programs for TPUs as StableHLO: `python jax_child.py REQUEST.json`.

A process of its own, because PyTorch/XLA and JAX do not share one. The request is `programs`, a
list of objects with `form` (a name of `FORMS`), `artifact` (a file to write) and the form's sizes;
one with `given` and `found` is run on the CPU instead, from arrays of one file into the other.
These are yardsticks: what one would write in plain JAX.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

from bill.children.jax_step import Array, run_child, write_old_kernels
from utils.json_types import JsonObject

Example = tuple[Array, Array]  # a function with the shapes of its arguments

_OUT_OF_REACH = -1e30


def main(argv: list[str]) -> int:
    """Export every program that the request names."""
    return run_child(argv, run)


def run(request: JsonObject) -> JsonObject:
    """Export or run the programs of a request."""
    for program in request["programs"]:
        function, arguments = FORMS[program["form"]](program)
        if "given" in program:
            run_program(function, program)
        else:
            Path(program["artifact"]).write_bytes(export_program(function, arguments))
    return {}


def export_program(function: Array, arguments: Array) -> bytes:
    """Export a portable artifact of a function of arrays of such shapes."""
    import jax
    from jax import export

    write_old_kernels()
    exported = export.export(jax.jit(function), platforms=["tpu"])(*arguments)
    return exported.mlir_module_serialized


def run_program(function: Array, program: JsonObject) -> None:
    """Run a function on stored arrays and store its results."""
    import jax
    import numpy as np

    with np.load(program["given"]) as file:
        outputs = jax.jit(function)(*[file[name] for name in file.files])
    np.savez(program["found"], *jax.tree.leaves(outputs))


def describe(*sizes: int, dtype: str = "bfloat16") -> Array:
    """Describe an argument's shape."""
    import jax
    import jax.numpy as jnp

    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


def make_product(program: JsonObject) -> Example:
    """`sizes` [M, K, N]: a product of bfloat16 matrices."""
    import jax.numpy as jnp

    rows, inner, columns = program["sizes"]
    return jnp.matmul, (describe(rows, inner), describe(inner, columns))


def make_kernel_product(program: JsonObject) -> Example:
    """Create a Pallas kernel of a product that sums over K in VMEM, by `blocks` [M, K, N]."""
    import jax.numpy as jnp
    from jax import ShapeDtypeStruct
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    rows, inner, columns = program["sizes"]
    of_rows, of_inner, of_columns = program["blocks"]

    def kernel(left: Array, right: Array, result: Array, total: Array) -> None:
        @pl.when(pl.program_id(2) == 0)
        def _() -> None:
            total[...] = jnp.zeros_like(total)

        total[...] += jnp.dot(left[...], right[...], preferred_element_type=jnp.float32)

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _() -> None:
            result[...] = total[...].astype(result.dtype)

    def cut(sizes: tuple[int, int], place: Callable[[Array, Array, Array], Example]) -> Array:
        return pl.BlockSpec(sizes, place)

    function = pl.pallas_call(
        kernel,
        grid=(rows // of_rows, columns // of_columns, inner // of_inner),
        in_specs=[
            cut((of_rows, of_inner), lambda i, j, k: (i, k)),
            cut((of_inner, of_columns), lambda i, j, k: (k, j)),
        ],
        out_specs=cut((of_rows, of_columns), lambda i, j, k: (i, j)),
        out_shape=ShapeDtypeStruct((rows, columns), jnp.bfloat16),
        scratch_shapes=[pltpu.VMEM((of_rows, of_columns), jnp.float32)],
    )
    return function, (describe(rows, inner), describe(inner, columns))


def make_loop(program: JsonObject) -> Example:
    """`trips` products of a square matrix of `size` with itself, one after the other."""
    import jax
    import jax.numpy as jnp

    def function(x: Array) -> Array:
        def turn(_: Array, y: Array) -> Array:
            return jnp.tanh(y @ x)

        return jax.lax.fori_loop(0, program["trips"], turn, x)

    return function, (describe(program["size"], program["size"]),)


def make_sum(program: JsonObject) -> Example:
    """Two float32 arrays of `elements` added: nothing but traffic."""
    import jax.numpy as jnp

    argument = describe(program["elements"] // 1024, 1024, dtype="float32")
    return jnp.add, (argument, argument)


def make_delta_rule(program: JsonObject) -> Example:
    """Gated DeltaNet of `sizes` [B, T, Hk, Hv, K = V, C], and with `backward` its gradients.

    As JAX trainers write it: a triangular solve of all chunks, a scan over them, every product at
    the highest precision, float32 inside.
    """
    import jax

    batch, tokens, keys, values, width, _ = program["sizes"]
    rows = describe(batch, tokens, keys, width)
    wide = describe(batch, tokens, values, width)
    gates = describe(batch, tokens, values, dtype="float32")

    def forward(q: Array, k: Array, v: Array, g: Array, rate: Array) -> Array:
        return compute_delta_rule(q, k, v, g, rate, program["sizes"][-1])

    def both(*given: Array) -> Array:
        output, pull = jax.vjp(forward, *given[:-1])
        return output, pull(given[-1])

    if program["backward"]:
        return both, (rows, rows, wide, gates, gates, wide)
    return forward, (rows, rows, wide, gates, gates)


def compute_delta_rule(q: Array, k: Array, v: Array, g: Array, rate: Array, chunk: int) -> Array:
    """[B, T, Hv, V] of q and k [B, T, Hk, K], v, and g and rate [B, T, Hv]."""
    import jax
    import jax.numpy as jnp

    (batch, tokens, heads, width), dtype = v.shape, v.dtype
    chunk = min(chunk, tokens)
    share = heads // k.shape[2]
    multiply = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)

    def cut(x: Array) -> Array:
        x = x.astype(jnp.float32).reshape(batch, tokens // chunk, chunk, heads, -1)
        return x.transpose(1, 0, 3, 2, 4)

    q, k = (cut(jnp.repeat(x, share, axis=2)) for x in (q, k))
    v, sums, rate = cut(v), jnp.cumsum(cut(g[..., None])[..., 0], axis=-1), cut(rate[..., None])
    place = jnp.arange(chunk)
    lower, below = place[:, None] >= place, place[:, None] > place
    decay = jnp.exp(jnp.where(lower, sums[..., :, None] - sums[..., None, :], _OUT_OF_REACH))
    system = multiply("nbhik,nbhjk->nbhij", k * rate, k) * jnp.where(below, decay, 0.0)
    sides = jnp.concatenate([v * rate, k * rate * jnp.exp(sums)[..., None]], axis=-1)
    solved = jax.scipy.linalg.solve_triangular(
        system + jnp.eye(chunk), sides, lower=True, unit_diagonal=True
    )
    pairs = multiply("nbhik,nbhjk->nbhij", q, k) * decay
    into, last = q * jnp.exp(sums)[..., None], sums[..., -1:]
    out = k * jnp.exp(last - sums)[..., None]

    def step(state: Array, one: Array) -> Array:
        u, w, p, query, key, whole = one
        values = u - multiply("bhck,bhkv->bhcv", w, state)
        output = multiply("bhck,bhkv->bhcv", query, state) + multiply("bhij,bhjv->bhiv", p, values)
        moved = state * whole[..., None] + multiply("bhck,bhcv->bhkv", key, values)
        return moved, output

    start = jnp.zeros((batch, heads, width, width))
    parts = (solved[..., :width], solved[..., width:], pairs, into, out, jnp.exp(last))
    _, output = jax.lax.scan(step, start, parts)
    return output.transpose(1, 0, 3, 2, 4).reshape(batch, tokens, heads, width).astype(dtype)


def make_residual_step(program: JsonObject) -> Example:
    """Create a training step of a residual network on `batch` images, as big_vision trains BiT.

    Bottlenecks of `blocks` a stage, standardised kernels, GroupNorm of 32 groups, cross-entropy,
    gradients clipped to length 1, momentum kept in bfloat16.
    """
    import jax
    import jax.numpy as jnp

    shapes = list_residual_shapes(program["blocks"], program["classes"])
    weights = [describe(*shape, dtype="float32") for shape in shapes]
    moments = [describe(*shape) for shape in shapes]
    images = describe(program["batch"], 224, 224, 3, dtype="float32")
    labels = describe(program["batch"], dtype="int32")

    def find_loss(weights: Array, images: Array, labels: Array) -> Array:
        log_probs = jax.nn.log_softmax(answer_residual(weights, images, program["blocks"]))
        return -jnp.mean(jnp.take_along_axis(log_probs, labels[:, None], axis=-1))

    def step(weights: Array, moments: Array, images: Array, labels: Array, lr: Array) -> Array:
        loss, grads = jax.value_and_grad(find_loss)(weights, images, labels)
        length = jnp.sqrt(sum(jnp.sum(grad * grad) for grad in grads))
        grads = [grad / jnp.maximum(1.0, length) for grad in grads]
        moments = [
            0.9 * old.astype(jnp.float32) + new for old, new in zip(moments, grads, strict=True)
        ]
        decays = [1.6e-3 if weight.ndim > 1 else 0.0 for weight in weights]
        rows = zip(weights, moments, decays, strict=True)
        weights = [weight - lr * (moment + decay * weight) for weight, moment, decay in rows]
        return weights, [moment.astype(jnp.bfloat16) for moment in moments], loss

    return step, (weights, moments, images, labels, describe(dtype="float32"))


def list_residual_shapes(blocks: list[int], classes: int) -> list[tuple[int, ...]]:
    """Kernels [H, W, I, O], each with scale and bias of its norm behind it, in order of use."""
    kernels, before = [(7, 7, 3, 64)], 64
    for stage, count in enumerate(blocks):
        middle = 64 * 2**stage
        for number in range(count):
            kernels += [(1, 1, before, 4 * middle)] if number == 0 else []
            kernels += [(1, 1, before, middle), (3, 3, middle, middle), (1, 1, middle, 4 * middle)]
            before = 4 * middle
    shapes = [shape for kernel in kernels for shape in (kernel, kernel[-1:], kernel[-1:])]
    return [*shapes, (before, classes), (classes,)]


def answer_residual(weights: Array, images: Array, blocks: list[int]) -> Array:
    """Logits of images [B, H, W, 3]."""
    import jax
    import jax.numpy as jnp

    left = iter(weights)

    def convolve(x: Array, stride: int) -> Array:
        kernel, scale, bias = next(left), next(left), next(left)
        kernel = kernel - jnp.mean(kernel, axis=(0, 1, 2))
        kernel = kernel / (jnp.std(kernel, axis=(0, 1, 2)) + 1e-5)
        form = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", dimension_numbers=form
        )
        groups = x.reshape(*x.shape[:3], 32, -1)
        mean = jnp.mean(groups, axis=(1, 2, 4), keepdims=True)
        squares = jnp.mean(groups * groups, axis=(1, 2, 4), keepdims=True)
        spread = jax.lax.rsqrt(jnp.maximum(squares - mean * mean, 0.0) + 1e-6)
        return ((groups - mean) * spread).reshape(x.shape) * scale + bias

    x = jax.nn.relu(convolve(images, 2))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    for stage, count in enumerate(blocks):
        for number in range(count):
            stride = 2 if stage and not number else 1
            beside = convolve(x, stride) if not number else x
            inner = jax.nn.relu(convolve(x, 1))
            inner = jax.nn.relu(convolve(inner, stride))
            x = jax.nn.relu(beside + convolve(inner, 1))
    return jnp.mean(x, axis=(1, 2)) @ next(left) + next(left)


FORMS = {
    "delta_rule": make_delta_rule,
    "product": make_product,
    "kernel_product": make_kernel_product,
    "residual_step": make_residual_step,
    "loop": make_loop,
    "sum": make_sum,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
