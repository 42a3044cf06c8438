"""Exports a step of a vision transformer or a Mixer written in JAX: `python vision_child.py REQUEST.json`.

As big_vision writes it: pre-norm blocks, q, k and v as three products, softmax, norms' results and
stream in bfloat16, GELU by tanh, weights and moments of AdamW in float32, nothing computed twice. A
yardstick for the compiler's figures of ours. A process of its own, because PyTorch/XLA and JAX do
not share one. Writes the artifact that the request names and `facts.json` beside it.
"""  # noqa: E501

from __future__ import annotations

import sys

from bill.children import jax_step
from bill.children.jax_step import Array
from utils.json_types import JsonObject

_DECAY, _NORM_EPS = 0.05, 1e-6


def main(argv: list[str]) -> int:
    """Export the step that the request describes."""
    return jax_step.run_child(argv, export_step)


def export_step(request: JsonObject) -> JsonObject:
    """Write the step as StableHLO for TPUs.

    Args:
      request: `artifact` (a file to write), `batch`, `classes`, `parts` (micro-batches),
        `attention_block` (images whose attention is computed at once; 0: all), `student`, `teacher`
        (None: labels alone), `teacher_parts` (of the images, which it sees one after the other),
        `alpha` (share of the teacher's term) and `temperature`. A model is `kind` (vit, mixer),
        `image`, `patch`, `depth`, `width`, `heads`, `hidden`, `mixing` (hidden width between
        tokens) and `prefix` (class tokens; 0: the mean of all).

    Returns:
      `state`: arguments that the results of the same numbers replace.
    """
    import jax
    import jax.numpy as jnp

    def describe(shape: tuple[int, ...], dtype: Array = jnp.float32) -> Array:
        return jax.ShapeDtypeStruct(shape, dtype)

    def describe_frozen(shape: tuple[int, ...]) -> Array:
        return describe(shape, jnp.bfloat16 if len(shape) > 1 else jnp.float32)

    def describe_model(of: Array, leaf: Array) -> Array:
        return jax_step.describe_shapes(list_shapes(of, request["classes"]), leaf)

    weights = describe_model(request["student"], describe)
    teacher = request["teacher"] and describe_model(request["teacher"], describe_frozen)
    batch, size = request["batch"], request["student"]["image"]
    images, labels = describe((batch, size, size, 3), jnp.bfloat16), describe((batch,), jnp.int32)
    number = describe(())
    arguments = (weights, weights, weights, teacher, images, labels, number, number)
    return {"state": jax_step.export_step(create_step(request), arguments, request["artifact"])}


def list_shapes(of: JsonObject, classes: int) -> JsonObject:
    """List the shapes of all weights of a model."""
    width, hidden, prefix, patch = of["width"], of["hidden"], of["prefix"], of["patch"]
    tokens = (of["image"] // patch) ** 2
    norm = {"scale": (width,), "bias": (width,)}
    block = {
        "norm1": norm,
        "norm2": norm,
        "up": _linear(width, hidden),
        "down": _linear(hidden, width),
    }
    shapes: JsonObject = {
        "patches": {"kernel": (patch, patch, 3, width), "bias": (width,)},
        "norm": norm,
        "heads": [_linear(width, classes) for _ in range(max(1, prefix))],
    }
    if of["kind"] == "mixer":
        block |= {"mix": _linear(tokens, of["mixing"]), "unmix": _linear(of["mixing"], tokens)}
    else:
        heads, size = of["heads"], width // of["heads"]
        into = {"kernel": (width, heads, size), "bias": (heads, size)}
        block |= {"query": into, "key": into, "value": into}
        block["out"] = {"kernel": (heads, size, width), "bias": (width,)}
        shapes["positions"] = (1, tokens + prefix, width)
        shapes |= {"prefix": (1, prefix, width)} if prefix else {}
    return {**shapes, "blocks": [block] * of["depth"]}


def _linear(into: int, out: int) -> JsonObject:
    return {"kernel": (into, out), "bias": (out,)}


def create_step(request: JsonObject) -> Array:
    """(weights, moments, teacher, images, labels, learning rate, step) -> state and the loss."""
    import jax
    import jax.numpy as jnp

    loss, parts = create_loss(request), request["parts"]

    def add(old: Array, new: Array) -> Array:
        return old + new / parts

    def step(weights: Array, firsts: Array, seconds: Array, teacher: Array, *rest: Array) -> Array:
        images, labels, lr, number = rest
        value, gradients = 0.0, jax.tree.map(jnp.zeros_like, weights) if parts > 1 else None
        for some in zip(jnp.split(images, parts), jnp.split(labels, parts), strict=True):
            nats, new = jax.value_and_grad(loss)(weights, teacher, *some)
            value += nats / parts
            gradients = jax.tree.map(add, gradients, new) if parts > 1 else new
        state = jax_step.apply_adamw((weights, firsts, seconds), gradients, lr, number, _DECAY)
        return *state, value

    return step


def create_loss(request: JsonObject) -> Array:
    """(weights, teacher's, images, labels) -> mean nats, the teacher's term mixed in."""
    import jax
    import jax.numpy as jnp

    alpha, heat = request["alpha"], request["temperature"]

    def loss(weights: Array, teacher: Array, images: Array, labels: Array) -> Array:
        block = request["attention_block"]
        logits = answer(weights, images, request["student"], block)
        log_probs = jax.nn.log_softmax(logits)
        value = -jnp.mean(jnp.take_along_axis(log_probs, labels[:, None], axis=-1))
        if teacher is None:
            return value
        parts = jnp.array_split(images, request["teacher_parts"])
        answers = [answer(teacher, part, request["teacher"], block) for part in parts]
        theirs = jax.lax.stop_gradient(jnp.concatenate(answers))
        probs, soft = jax.nn.softmax(theirs / heat), jax.nn.log_softmax(logits / heat)
        taught = -jnp.mean(jnp.sum(probs * soft, axis=-1))
        return (1 - alpha) * value + alpha * heat**2 * taught

    return loss


def answer(weights: Array, images: Array, of: JsonObject, block: int) -> Array:
    """Logits in float32 of images [B, H, W, 3] in bfloat16."""
    import jax
    import jax.numpy as jnp

    patches, prefix = weights["patches"], of["prefix"]
    size, side = of["patch"], of["image"] // of["patch"]
    cut = images.reshape(len(images), side, size, side, size, 3)
    # As a product: what a convolution prefers leaks into the layout of every block.
    stream = jnp.einsum("byuxvc,uvcd->byxd", cut, patches["kernel"].astype(images.dtype))
    stream = stream.reshape(len(images), -1, of["width"]) + patches["bias"].astype(stream.dtype)
    if prefix:
        shape = (len(images), prefix, of["width"])
        tokens = jnp.broadcast_to(weights["prefix"].astype(stream.dtype), shape)
        stream = jnp.concatenate([tokens, stream], axis=1)
    if of["kind"] == "vit":
        stream = stream + weights["positions"].astype(stream.dtype)
    for layer in weights["blocks"]:
        rows = normalise(stream, layer["norm1"])
        mix = mix_tokens if of["kind"] == "mixer" else attend
        stream = stream + mix(rows, layer, block)
        rows = normalise(stream, layer["norm2"])
        stream = stream + multiply(jax.nn.gelu(multiply(rows, layer["up"])), layer["down"])
    stream = normalise(stream, weights["norm"])
    pooled = [stream[:, place] for place in range(prefix)] or [jnp.mean(stream, axis=1)]
    logits = [multiply(x, head) for x, head in zip(pooled, weights["heads"], strict=True)]
    return sum(output.astype(jnp.float32) for output in logits) / len(logits)


def normalise(stream: Array, norm: Array) -> Array:
    """LayerNorm with both sums of one pass, float32 inside."""
    import jax
    import jax.numpy as jnp

    wide = stream.astype(jnp.float32)
    mean = jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.maximum(jnp.mean(wide * wide, axis=-1, keepdims=True) - mean * mean, 0.0)
    scale = jax.lax.rsqrt(variance + _NORM_EPS) * norm["scale"]
    return ((wide - mean) * scale + norm["bias"]).astype(stream.dtype)


def multiply(rows: Array, linear: Array) -> Array:
    """Apply a linear layer in the type of its input."""
    return rows @ linear["kernel"].astype(rows.dtype) + linear["bias"].astype(rows.dtype)


def mix_tokens(rows: Array, one: Array, block: int) -> Array:
    """Apply a Mixer's layer between tokens."""
    import jax

    columns = rows.swapaxes(1, 2)
    return multiply(jax.nn.gelu(multiply(columns, one["mix"])), one["unmix"]).swapaxes(1, 2)


def attend(rows: Array, one: Array, block: int) -> Array:
    """Attention [B, N, C] -> [B, N, C]; of `block` images at a time, if that is not 0."""
    import jax
    import jax.numpy as jnp

    def project(name: str) -> Array:
        kernel, bias = (one[name][part].astype(rows.dtype) for part in ("kernel", "bias"))
        return jnp.einsum("bnc,chd->bnhd", rows, kernel) + bias

    def mix(heads: Array) -> Array:
        query, key, value = heads
        scores = jnp.einsum("bqhd,bkhd->bhqk", query * query.shape[-1] ** -0.5, key)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)

    heads = tuple(project(name) for name in ("query", "key", "value"))
    if block and block < len(rows):
        cut = tuple(x.reshape(-1, block, *x.shape[1:]) for x in heads)
        mixed = jax.lax.map(mix, cut).reshape(heads[0].shape)
    else:
        mixed = mix(heads)
    out = one["out"]
    wide = jnp.einsum("bnhd,hdc->bnc", mixed, out["kernel"].astype(rows.dtype))
    return wide + out["bias"].astype(rows.dtype)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
