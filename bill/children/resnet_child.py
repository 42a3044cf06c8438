"""Exports a step of a ResNet written in JAX: `python resnet_child.py REQUEST.json`.

As flax's example writes it: images [B, H, W, C], convolutions, norms' results and stream in
bfloat16, both sums of a norm by one pass in float32, weights, moments of AdamW and moving
statistics in float32. A process of its own, as `vision_child.py`.
"""

from __future__ import annotations

import sys

from bill.children import jax_step
from bill.children.jax_step import Array
from bill.children.vision_child import multiply
from utils.json_types import JsonObject

_DECAY, _NORM_EPS, _MOMENTUM, _EXPANSION = 0.05, 1e-5, 0.1, 4
_MOVING = ("mean", "variance")


def main(argv: list[str]) -> int:
    """Export the step that the request describes."""
    return jax_step.run_child(argv, export_step)


def export_step(request: JsonObject) -> JsonObject:
    """Write the step as StableHLO for TPUs.

    Args:
      request: `artifact` (a file to write), `batch`, `classes` and `student`: `image`, `width` (of
        the stem) and `depths` (bottlenecks in each stage).

    Returns:
      `state`: arguments that the results of the same numbers replace.
    """
    import jax
    import jax.numpy as jnp

    def describe(shape: tuple[int, ...], dtype: Array = jnp.float32) -> Array:
        return jax.ShapeDtypeStruct(shape, dtype)

    shapes, moving_shapes = list_shapes(request["student"], request["classes"])
    weights = jax_step.describe_shapes(shapes, describe)
    moving = jax_step.describe_shapes(moving_shapes, describe)
    batch, size = request["batch"], request["student"]["image"]
    images, labels = describe((batch, size, size, 3), jnp.bfloat16), describe((batch,), jnp.int32)
    number = describe(())
    arguments = (weights, weights, weights, moving, images, labels, number, number)
    state = jax_step.export_step(step, arguments, request["artifact"])
    return {"state": state + len(jax.tree.leaves(moving))}


def list_shapes(of: JsonObject, classes: int) -> tuple[JsonObject, JsonObject]:
    """List the shapes of all weights, and those of the norms' moving statistics.

    Both are trees of a unit (a convolution and its norm) at the stem, and of lists of bottlenecks.
    """
    stem, into = of["width"], of["width"]
    units: JsonObject = {"stem": _unit(7, 3, stem), "stages": []}
    for stage, depth in enumerate(of["depths"]):
        width = stem * 2**stage
        out, blocks = width * _EXPANSION, list[JsonObject]()
        for place in range(depth):
            block = {
                "reduce": _unit(1, into, width),
                "middle": _unit(3, width, width),
                "expand": _unit(1, width, out),
            }
            blocks.append({**block, "shortcut": _unit(1, into, out)} if place == 0 else block)
            into = out
        units["stages"].append(blocks)
    weights = {
        **keep(units, is_moving=False),
        "head": {"kernel": (into, classes), "bias": (classes,)},
    }
    return weights, keep(units, is_moving=True)


def _unit(side: int, into: int, out: int) -> JsonObject:
    own = {"kernel": (side, side, into, out), "scale": (out,), "bias": (out,)}
    return {**own, "mean": (out,), "variance": (out,)}


def keep(node: Array, *, is_moving: bool) -> Array:
    """Keep the moving statistics of all units, or all but them."""
    if isinstance(node, list):
        return [keep(part, is_moving=is_moving) for part in node]
    if "kernel" in node:
        return {name: x for name, x in node.items() if (name in _MOVING) == is_moving}
    return {name: keep(part, is_moving=is_moving) for name, part in node.items()}


def step(weights: Array, firsts: Array, seconds: Array, moving: Array, *rest: Array) -> Array:
    """(..., images, labels, learning rate, step) -> weights, moments, statistics and the loss."""
    import jax
    import jax.numpy as jnp

    images, labels, lr, number = rest

    def loss(weights: Array) -> tuple[Array, Array]:
        logits, moved = answer(weights, moving, images)
        log_probs = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(log_probs, labels[:, None], axis=-1)), moved

    (value, moved), gradients = jax.value_and_grad(loss, has_aux=True)(weights)
    state = jax_step.apply_adamw((weights, firsts, seconds), gradients, lr, number, _DECAY)
    return *state, moved, value


def answer(weights: Array, moving: Array, images: Array) -> tuple[Array, Array]:
    """Float32 logits of images [B, H, W, 3], with norms of the batch; and the moved statistics."""
    import jax
    import jax.numpy as jnp

    relu = jax.nn.relu
    stream, stem = convolve(images, weights["stem"], moving["stem"], stride=2)
    window, pads = ((1, 3, 3, 1), (1, 2, 2, 1)), ((0, 0), (1, 1), (1, 1), (0, 0))
    stream = jax.lax.reduce_window(relu(stream), -jnp.inf, jax.lax.max, *window, pads)
    moved: JsonObject = {"stem": stem, "stages": []}
    for stage, blocks in enumerate(zip(weights["stages"], moving["stages"], strict=True)):
        moved["stages"].append([])
        for place, (block, old) in enumerate(zip(*blocks, strict=True)):
            stride, new = 2 if stage and place == 0 else 1, dict[str, JsonObject]()
            x, new["reduce"] = convolve(stream, block["reduce"], old["reduce"])
            x, new["middle"] = convolve(relu(x), block["middle"], old["middle"], stride)
            x, new["expand"] = convolve(relu(x), block["expand"], old["expand"])
            if "shortcut" in block:
                unit = block["shortcut"], old["shortcut"]
                stream, new["shortcut"] = convolve(stream, *unit, stride)
            stream = relu(x + stream)
            moved["stages"][-1].append(new)
    logits = multiply(jnp.mean(stream, axis=(1, 2)), weights["head"])
    return logits.astype(jnp.float32), moved


def convolve(x: Array, unit: Array, old: Array, stride: int = 1) -> tuple[Array, Array]:
    """Convolve [B, H, W, C] and normalise by the batch; also gives the moved statistics."""
    import jax
    import jax.numpy as jnp

    kernel = unit["kernel"].astype(x.dtype)
    pads, form = [(len(kernel) // 2,) * 2] * 2, ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(x, kernel, (stride,) * 2, pads, dimension_numbers=form)
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=(0, 1, 2))
    variance = jnp.maximum(jnp.mean(wide * wide, axis=(0, 1, 2)) - mean * mean, 0.0)
    scale = jax.lax.rsqrt(variance + _NORM_EPS) * unit["scale"]
    count = wide.size // wide.shape[-1]
    batch = {"mean": mean, "variance": variance * (count / (count - 1))}
    moved = {name: old[name] + _MOMENTUM * (batch[name] - old[name]) for name in _MOVING}
    return ((wide - mean) * scale + unit["bias"]).astype(x.dtype), jax.lax.stop_gradient(moved)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
