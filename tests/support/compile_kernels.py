"""Compiles every kernel for an absent TPU: `python compile_kernels.py v5e`.

Prints how many custom calls each program has.

A process of its own, because libtpu may abort it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.delta.kernels.forward import FusedPlan

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bill.children.compile_child import SETTINGS  # noqa: E402

os.environ.update(SETTINGS)
os.environ.pop("PJRT_DEVICE", None)
TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}


def list_walks() -> Iterator[tuple[str, object, list[tuple[int, ...]]]]:
    """Names, functions and sizes of float32 arguments."""
    from models.delta.kernels.state_scan import WalkPlan, walk_back, walk_forward

    count, heads, chunk, key, value = 3, 8, 64, 128, 128
    pairs, keys = (count, heads, chunk, chunk), (count, heads, chunk, key)
    values, state = (count, heads, chunk, value), (heads, key, value)
    for gates in (1, key):
        last = (count, heads, 1, gates)
        factors = [state, pairs, keys, values, pairs, keys, keys, last]
        yield f"forward {gates}", partial(walk_forward, WalkPlan(keep=True)), factors
        factors = [state, pairs, keys, pairs, keys, keys, last, values]
        yield f"back {gates}", partial(walk_back, WalkPlan()), factors
    factors = [state, pairs, keys, values, pairs, keys, keys, last, (count, *state)]
    yield "added", partial(walk_forward, WalkPlan(added=True)), factors


def list_rules() -> Iterator[tuple[str, object, list[tuple[tuple[int, ...], str]]]]:
    """The fused kernel, with sizes and types of its arguments."""
    from models.delta.kernels.forward import FusedPlan, fused_forward

    for kind, chunk, keep, channels in (
        ("bfloat16", 128, False, 0),
        ("bfloat16", 64, True, 0),
        ("float32", 64, True, 0),
        ("bfloat16", 64, True, 1),
        ("float32", 64, False, 1),
        ("bfloat16", 64, True, 3),
    ):
        heads, group, width, tokens = 4, 2, 128, 256
        plan = FusedPlan((width, width), 1, group, chunk, channels, keep)
        of_tokens = (1, tokens, heads * width)
        given = [((1, heads, width, width), "float32"), *([(of_tokens, kind)] * 3)]
        given += list_gates(plan, of_tokens)
        yield f"rule {kind} {chunk} {channels}", partial(fused_forward, plan), given
    yield from list_backs()


def list_backs() -> Iterator[tuple[str, object, list[tuple[tuple[int, ...], str]]]]:
    """Its way back, keys shared by two heads."""
    from models.delta.kernels.backward import fused_back
    from models.delta.kernels.forward import FusedPlan

    heads, group, width, tokens = 8, 4, 128, 256
    for kind, chunk, channels in (
        ("bfloat16", 128, 0),
        ("float32", 64, 0),
        ("bfloat16", 128, 1),
        ("float32", 64, 1),
        ("bfloat16", 64, 3),
    ):
        plan = FusedPlan((width, width), 2, group, chunk, channels)
        count, state = tokens // chunk, ((1, heads, width, width), "float32")
        of_tokens, of_keys = ((1, tokens, n * width) for n in (heads, heads // 2))
        given = [state, *((x, kind) for x in (of_keys, of_keys, of_tokens))]
        given += list_gates(plan, of_tokens)
        given += [((count, 1, heads, n, n), "float32") for n in (chunk, width)]
        name = f"back {kind} {chunk} {channels}"
        yield name, partial(fused_back, plan), [*given, (of_tokens, kind)]


def list_gates(
    plan: FusedPlan, of_tokens: tuple[int, int, int]
) -> list[tuple[tuple[int, ...], str]]:
    """Gates of each channel, and rows of those of a head."""
    from models.delta.kernels.head_tiles import ROWS

    kinds = (4, 2, 0, 0)[plan.channels]
    chunks, groups = of_tokens[1] // plan.chunk, of_tokens[2] // plan.widths[0] // plan.group
    rows = ((chunks, 1, groups, kinds * ROWS, plan.chunk), "float32")
    return [(of_tokens, "float32")] * plan.channels + [rows] * bool(kinds)


def list_flashes() -> Iterator[tuple[str, object, list[tuple[tuple[int, ...], str]]]]:
    """Flash attention, forward and its two ways back, of heads of one row of lanes and of half."""
    from models.delta.kernels.flash import (
        FlashPlan,
        flash_back_columns,
        flash_back_rows,
        flash_forward,
    )

    for kind, width in (("bfloat16", 128), ("float32", 64)):
        sizes = (1, 2, 1024)
        of_tokens, plan = ((*sizes, width), kind), FlashPlan(width**-0.5)
        yield f"flash {kind}", partial(flash_forward, plan), [of_tokens] * 3
        kept = FlashPlan(width**-0.5, keep=True)
        yield f"flash kept {kind}", partial(flash_forward, kept), [of_tokens] * 3
        for name, function, lanes in (
            ("rows", flash_back_rows, 512),
            ("columns", flash_back_columns, 128),
        ):
            of_rows = [((*sizes, n), "float32") for n in (128, 128, lanes)]
            given = [*[of_tokens] * 3, *of_rows[:2], of_tokens, of_rows[2]]
            yield f"flash {name} {kind}", partial(function, plan), given


def list_steps() -> Iterator[tuple[str, object, list[tuple[int, ...]]]]:
    """A step of decoding: a delta rule's, one of two updates, RWKV-7's of narrow heads."""
    from models.delta.kernels.decode_step import StepPlan, step_forward

    for name, plan, kinds, width in (
        ("delta", StepPlan(8), 4, 128),
        ("two updates", StepPlan(4, 2), 6, 128),
        ("rwkv7", StepPlan(2, 1, is_delta=False), 5, 64),
    ):
        shapes = [(2 * plan.group, width, width), (2, 8 * kinds, width)]
        given = [*shapes, (2, 8 * plan.updates, width)]
        yield f"step {name}", partial(step_forward, plan), given


def list_attention() -> Iterator[tuple[str, object, list[tuple[tuple[int, ...], str]]]]:
    """That of vision transformers, with and without gradients."""
    from models.patches.kernels_attention import (
        AttentionPlan,
        attend_back,
        attend_forward,
        choose_group,
    )

    for heads, width, tokens in ((6, 64, 197), (16, 80, 257), (12, 64, 785)):
        plan = AttentionPlan(width**-0.5, choose_group(heads, width, tokens), keep=True)
        packed = ((2, 3, heads, width, tokens), "bfloat16")
        mixed = ((2, heads, width, tokens), "bfloat16")
        yield f"attend {tokens}", partial(attend_forward, plan), [packed]
        given = [packed, ((2, heads, 1, tokens), "float32"), mixed, mixed]
        yield f"attend back {tokens}", partial(attend_back, plan), given


def list_kernels() -> Iterator[tuple[str, object, list[tuple[tuple[int, ...], str]]]]:
    """All of them."""
    for name, function, shapes in (*list_walks(), *list_steps()):
        yield name, function, [(shape, "float32") for shape in shapes]
    yield from list_rules()
    yield from list_attention()
    yield from list_flashes()


def main(generation: str) -> None:
    """Compile all of them."""
    import jax
    from jax._src import tpu_custom_call
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    # jax takes the compiler's version from a TPU where there is one; libtpu 0.0.21 reads 7.
    tpu_custom_call.get_ir_version = lambda *given, **named: 7
    name = TOPOLOGIES[generation]
    topology = topologies.get_topology_desc(platform="tpu", topology_name=name)
    place = SingleDeviceSharding(topology.devices[0])
    found: dict[str, int] = {}
    for kernel, function, arguments in list_kernels():
        given = [jax.ShapeDtypeStruct(x, kind, sharding=place) for x, kind in arguments]
        traced = jax.jit(function).trace(*given)
        compiled = traced.lower(lowering_platforms=("tpu",)).compile()
        found[kernel] = compiled.as_text().count('"tpu_custom_call"')
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
