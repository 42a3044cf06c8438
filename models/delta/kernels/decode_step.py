"""A step of decoding as one Pallas kernel, which reads and writes each state once.

All rules are S <- diag(d) S + k u^T + b (S^T a)^T and an output S^T q: a delta rule has
a = d erase k and b = -k. The other inputs are a few rows of a head, computed before. XLA's form
reads a state twice, because S^T a must be complete before S changes. A state is [K, V] in whole
tiles; rows of a head become columns [K, 1] by one transpose, and spread over its lanes.
Written against jax 0.7.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from models.delta.kernels.bridge import Heads, deal, run_kernel
from models.delta.kernels.lazy_jax import Tile, cut, jax, jnp, pl, pltpu
from models.delta.rules.inputs import DeltaInputs, Inputs, create_state

if TYPE_CHECKING:
    from jax import Array
    from jax.experimental.pallas import BlockSpec

# Heads of a program: each sort of row (q, d, k, ...) has one row of each head, and so whole tiles.
_ROWS = 8


@dataclass(frozen=True)
class StepPlan:
    """The constants of a program, beside the shapes of its arguments."""

    group: int  # heads of a program
    updates: int = 1  # of the token
    is_delta: bool = True  # b is -k, and no argument
    interpret: bool = False  # run as plain XLA, on devices other than TPUs


def step_rule(inputs: Inputs, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute outputs [B, 1, H, V] of one token and the next state, without gradients."""
    state, is_delta = create_state(inputs, state), isinstance(inputs, DeltaInputs)
    if isinstance(inputs, DeltaInputs):
        parts, values = _list_delta(inputs)
    else:
        values = inputs.v
        parts = [inputs.q, inputs.g.float().exp(), inputs.k, inputs.a, inputs.b]
    # [B, H, sorts, K] and [B, H, updates, V].
    rows = torch.stack([x.float().squeeze(1) for x in parts], dim=2)
    values = values.float().transpose(1, 2)
    output, state = kernel_step(rows, values, state, is_delta)
    return output.unsqueeze(1).to(inputs.v.dtype), state


def _list_delta(inputs: DeltaInputs) -> tuple[list[Tensor], Tensor]:
    """List queries, decays and, of each update, k and a; and u of all updates."""
    wide = inputs.widen()
    decay = wide.g.float().exp().expand_as(wide.q)
    parts, key = [wide.q, decay], wide.k.float()
    reads = wide.erase * key
    for step in range(inputs.steps):
        row = slice(step, step + 1)
        parts += [key[:, row], reads[:, row] if step else decay * reads[:, row]]
    return parts, wide.write * wide.v.float()


@torch.library.custom_op("delta::kernel_step", mutates_args=())
def kernel_step(
    rows: Tensor, values: Tensor, state: Tensor, is_delta: bool
) -> tuple[Tensor, Tensor]:
    """Compute outputs [B, H, V] and the next state, of a state [B, H, K, V].

    `rows` [B, H, sorts, K] are q and d, then of each update k and a, or k, a and b; `values` are u
    [B, H, updates, V].
    """
    run = partial(_run, is_delta)
    heads = Heads(state.shape[1], [1] * 3, [1, 1])
    output, moved = deal(run, [state, rows, values], [0] * 3, [0, 0], heads)
    return output, moved


@kernel_step.register_fake
def _(rows: Tensor, values: Tensor, state: Tensor, is_delta: bool) -> tuple[Tensor, Tensor]:
    return values.new_empty((*values.shape[:2], values.shape[-1])), torch.empty_like(state)


def _run(is_delta: bool, state: Tensor, rows: Tensor, values: Tensor) -> list[Tensor]:
    flat, batch = state.flatten(0, 1), state.shape[:2]
    count, _, width = flat.shape
    group = next(n for n in (_ROWS, 4, 2, 1) if count % n == 0)
    plan = StepPlan(group, values.shape[2], is_delta)
    given = [flat, *(_arrange(x.flatten(0, 1), group) for x in (rows, values))]
    results = [((count // group, _ROWS, width), values.dtype), (flat.shape, flat.dtype)]
    output, moved = run_kernel(step_forward, plan, given, results)
    output = output[:, :group].flatten(0, 1)
    return [x.unflatten(0, batch) for x in (output, moved)]


def _arrange(rows: Tensor, group: int) -> Tensor:
    """[G, sorts, D] -> [G / group, sorts * ROWS, D]: of each sort a row of each head."""
    heads = rows.unflatten(0, (-1, group)).transpose(1, 2)
    return functional.pad(heads, [0, 0, 0, _ROWS - group]).flatten(1, 2)


def step_forward(plan: StepPlan, state: Array, rows: Array, values: Array) -> Sequence[Array]:
    """Compute outputs [G / group, ROWS, V] and the next state [G, K, V].

    `rows` are [G / group, sorts * ROWS, K], `values` [G / group, updates * ROWS, V].
    """

    def of_group(*sizes: int) -> BlockSpec:
        return cut(sizes, lambda program: (program, 0, 0))

    programs, width = values.shape[0], values.shape[2]
    whole = of_group(plan.group, *state.shape[1:])  # states, whole in VMEM
    shapes = [(programs, _ROWS, width), state.shape]
    return pl.pallas_call(
        partial(_step, plan),
        grid=(programs,),
        in_specs=[whole, of_group(1, *rows.shape[1:]), of_group(1, *values.shape[1:])],
        out_specs=[of_group(1, _ROWS, width), whole],
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=plan.interpret,
    )(state, rows, values)


def _step(plan: StepPlan, state: Tile, rows: Tile, values: Tile, output: Tile, moved: Tile) -> None:
    """Process a group of heads; products are elementwise and summed in float32.

    A matrix of one row would leave the matrix unit idle, and round to bfloat16.
    """
    columns, sorts = rows[0].T, 2 if plan.is_delta else 3  # [K, sorts * ROWS]
    for head in range(plan.group):
        # [K, 1] each, one of a sort; then of each update those of `kernel_step`.
        query, decay, *rest = [columns[:, n : n + 1] for n in range(head, columns.shape[1], _ROWS)]
        now = state[head]  # [K, V]
        for step in range(plan.updates):
            key, reader, *low = rest[sorts * step : sorts * (step + 1)]
            read = jnp.sum(now * reader, axis=0, keepdims=True)  # S^T a [1, V]
            now = now if step else decay * now  # once: the first `a` has the decay in it
            row = step * _ROWS + head
            written = values[0, row : row + 1]
            now = now + (key * written + low[0] * read if low else key * (written - read))
        moved[head] = now
        output[0, head : head + 1] = jnp.sum(now * query, axis=0, keepdims=True)
    if plan.group < _ROWS:  # rows of no head, which `_run` cuts off
        output[0, plan.group :] = jnp.zeros((_ROWS - plan.group, output.shape[2]), jnp.float32)
