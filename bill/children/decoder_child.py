"""Exports a decoder's training step written in JAX: `python decoder_child.py REQUEST.json`.

The same maths as `models/transformer.py` with `tasks/language/task.py`, as one would write it in
plain JAX: a yardstick for the compiler's estimate of ours. A process of its own, because
PyTorch/XLA and JAX do not share one. Writes the artifact that the request names and `facts.json`
beside it.
"""

from __future__ import annotations

import sys

from bill.children.jax_step import Array, apply_adamw, describe_shapes, export_step, run_child
from utils.json_types import JsonObject

_DECAY, _NORM_EPS = 0.1, 1e-6
_ROPE_BASE, _MAX_NORM = 10_000.0, 1.0


def main(argv: list[str]) -> int:
    """Export the step that the request describes."""
    return run_child(argv, export_decoder)


def export_decoder(request: JsonObject) -> JsonObject:
    """Write the step as StableHLO for TPUs.

    Args:
      request: `artifact` (a file to write), `devices`, `batch` (of a device), `length`, `vocab`,
        `depth`, `width`, `heads`, `kv_heads`, `hidden`, `chunk` (places whose logits are there at
        once), `softmax` (float32 or bfloat16).

    Returns:
      `state`: arguments that the results of the same numbers replace.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.config.update("jax_use_shardy_partitioner", False)
    mesh = Mesh(np.array(jax.devices("cpu")), ("data",))
    whole, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))

    def describe(
        shape: tuple[int, ...], dtype: Array = jnp.float32, sharding: Array = whole
    ) -> Array:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    weights = describe_shapes(list_shapes(request), describe)
    examples = request["batch"] * request["devices"]
    tokens = describe((examples, request["length"] + 1), jnp.int32, split)
    number = describe(())
    arguments = (weights, weights, weights, tokens, number, number)
    return {"state": export_step(create_step(request), arguments, request["artifact"])}


def list_shapes(request: JsonObject) -> JsonObject:
    """List the shapes of all weights."""
    width, heads, kv = request["width"], request["heads"], request["kv_heads"]
    size, hidden = width // heads, request["hidden"]
    block = {
        "attention_norm": (width,),
        "mlp_norm": (width,),
        "query": (width, heads, size),
        "key": (width, kv, size),
        "value": (width, kv, size),
        "out": (heads, size, width),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
    }
    blocks = [dict(block) for _ in range(request["depth"])]
    return {"embedding": (request["vocab"], width), "blocks": blocks, "norm": (width,)}


def create_step(request: JsonObject) -> Array:
    """(weights, first and second moments, tokens, learning rate, step) -> the same and the loss."""
    import jax
    import jax.numpy as jnp

    loss = create_loss(request)

    def step(
        weights: Array, firsts: Array, seconds: Array, tokens: Array, lr: Array, number: Array
    ) -> Array:
        value, gradients = jax.value_and_grad(loss)(weights, tokens)
        norm = jnp.sqrt(sum(jnp.sum(part * part) for part in jax.tree.leaves(gradients)))
        scale = jnp.minimum(1.0, _MAX_NORM / (norm + 1e-6))

        def clip(gradient: Array) -> Array:
            return gradient * scale

        gradients = jax.tree.map(clip, gradients)
        state = apply_adamw((weights, firsts, seconds), gradients, lr, number, _DECAY)
        return *state, value, norm

    return step


def create_loss(request: JsonObject) -> Array:
    """(weights, tokens [B, T + 1]) -> mean nats of the next token."""
    import jax
    import jax.numpy as jnp

    score_in_chunks = create_chunked_score(request["chunk"])

    def loss(weights: Array, tokens: Array) -> Array:
        places, targets = tokens[:, :-1], tokens[:, 1:]
        stream = weights["embedding"][places].astype(jnp.bfloat16)
        for block in weights["blocks"]:
            rows = normalise(stream, block["attention_norm"])
            stream = stream + attend(rows, block, request)
            rows = normalise(stream, block["mlp_norm"])
            gate, up, down = (block[n].astype(jnp.bfloat16) for n in ("gate", "up", "down"))
            stream = stream + (jax.nn.silu(rows @ gate) * (rows @ up)) @ down
        hidden = normalise(stream, weights["norm"])
        return score_in_chunks(hidden, weights["embedding"], targets) / targets.size

    return loss


def normalise(stream: Array, weight: Array) -> Array:
    """RMSNorm, float32 inside."""
    import jax
    import jax.numpy as jnp

    wide = stream.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + _NORM_EPS)
    return (wide * scale * weight).astype(stream.dtype)


def attend(rows: Array, block: JsonObject, request: JsonObject) -> Array:
    """Causal attention [B, T, C] -> [B, T, C], heads in groups that share keys and values."""
    import jax
    import jax.numpy as jnp

    q, k, v = (
        jnp.einsum("btc,chd->bthd", rows, block[name].astype(rows.dtype))
        for name in ("query", "key", "value")
    )
    q, k = rotate(q), rotate(k)
    examples, length, _, size = q.shape
    q = (q * size**-0.5).reshape(examples, length, request["kv_heads"], -1, size)
    dtype = jnp.dtype(request["softmax"])
    scores = jnp.einsum("bqkgd,btkd->bkgqt", q, k, preferred_element_type=dtype)
    seen = jnp.tril(jnp.ones((length, length), bool))
    scores = jnp.where(seen, scores, jnp.finfo(dtype).min)
    shares = jax.nn.softmax(scores, axis=-1).astype(rows.dtype)
    mixed = jnp.einsum("bkgqt,btkd->bqkgd", shares, v)
    mixed = mixed.reshape(examples, length, -1, size)
    return jnp.einsum("bthd,hdc->btc", mixed, block["out"].astype(rows.dtype))


def rotate(heads: Array) -> Array:
    """Rotary positions of [B, T, H, D], float32 inside."""
    import jax.numpy as jnp

    half = heads.shape[-1] // 2
    steps = _ROPE_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(heads.shape[1], dtype=jnp.float32)[:, None] * steps
    cos, sin = (fn(angles)[:, None] for fn in (jnp.cos, jnp.sin))
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(heads.dtype)


def create_chunked_score(chunk: int) -> Array:
    """(hidden [B, T, C], head [V, C], targets [B, T]) -> summed nats, `chunk` places at once.

    Gradients are made while a chunk's logits are there, as `losses.tasks.chunked` does.
    """
    import jax
    import jax.numpy as jnp

    def score(hidden: Array, head: Array, targets: Array) -> Array:
        logits = jnp.einsum("btc,vc->btv", hidden, head).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - picked)

    @jax.custom_vjp
    def whole(hidden: Array, head: Array, targets: Array) -> Array:
        return score(hidden, head.astype(hidden.dtype), targets)

    def forward(hidden: Array, head: Array, targets: Array) -> Array:
        d_hidden: list[Array] = []
        cast, total, d_head = head.astype(hidden.dtype), 0.0, 0.0
        for start in range(0, hidden.shape[1], chunk):
            part = slice(start, start + chunk)
            value, (for_hidden, for_head) = jax.value_and_grad(score, argnums=(0, 1))(
                hidden[:, part], cast, targets[:, part]
            )
            total, d_head = total + value, d_head + for_head.astype(jnp.float32)
            d_hidden.append(for_hidden)
        return total, (jnp.concatenate(d_hidden, axis=1), d_head)

    def backward(kept: Array, gradient: Array) -> Array:
        d_hidden, d_head = kept
        return (d_hidden * gradient).astype(d_hidden.dtype), d_head * gradient, None

    whole.defvjp(forward, backward)
    return whole


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
