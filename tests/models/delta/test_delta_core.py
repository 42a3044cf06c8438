"""Delta attention: recurrences against NumPy, chunks against recurrences, gates at their ends."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import softplus

from models.delta.rules.chunked import chunk_delta_rule
from models.delta.rules.dplr import chunk_dplr
from models.delta.rules.inputs import DeltaInputs
from models.delta.rules.layout import CoreOptions
from models.delta.rules.recurrence import recur_delta_rule, recur_dplr
from models.delta.rules.solve import SOLVERS, invert
from tests.models.delta.variants import (
    RULES,
    B,
    H,
    K,
    T,
    V,
    create_inputs,
    create_start,
    find_gradients,
    find_largest_error,
    list_tensors,
    loop_in_numpy,
    rebuild,
)
from utils.errors import UserError

SEGMENTS = torch.tensor([[0] * 5 + [1] * 10 + [2] * 6, [4] * 8 + [1] * 9 + [0] * 4])
# Least and largest errors of float32 inputs with products of so many parts: 8, 16 and 24 bits.
BOUNDS = {"bfloat16": (1e-4, 3e-2), "bfloat16x3": (1e-6, 1e-4), "bfloat16x6": (0.0, 3e-6)}
MASK = torch.rand(B, T, generator=torch.Generator().manual_seed(1)) > 0.3


def get_recurrence(name):
    return recur_dplr if name == "rwkv7" else recur_delta_rule


def get_chunked(name):
    return chunk_dplr if name == "rwkv7" else chunk_delta_rule


@pytest.mark.parametrize("name", RULES)
def test_a_recurrence_equals_the_papers_product_of_matrices(name):
    inputs, start = create_inputs(name), create_start()
    output, state = get_recurrence(name)(inputs, start)
    for b in range(B):
        for h in range(H):
            wanted, last = loop_in_numpy(name, inputs, start[b, h].numpy(), b, h)
            np.testing.assert_allclose(output[b, :, h], wanted, atol=1e-13)
            np.testing.assert_allclose(state[b, h], last, atol=1e-13)


def take(inputs, b, places):
    """One example, and some places of its tokens."""

    def cut(x):
        count = x.shape[1] // T
        return x[b : b + 1, [p * count + j for p in places for j in range(count)]]

    return rebuild(inputs, cut)


@pytest.mark.parametrize("name", RULES)
def test_segments_are_independent_and_masked_tokens_are_skipped(name):
    """The first segment goes on from the state; each other one begins with none."""
    recur, inputs, start = get_recurrence(name), create_inputs(name), create_start()
    output, state = recur(inputs, start, segments=SEGMENTS, mask=MASK)
    for b in range(B):
        for number, segment in enumerate(SEGMENTS[b].unique_consecutive().tolist()):
            seen = (SEGMENTS[b] == segment) & MASK[b]
            places = seen.nonzero().flatten().tolist()
            alone, last = recur(take(inputs, b, places), start[b : b + 1] if not number else None)
            torch.testing.assert_close(output[b, places], alone[0], rtol=0, atol=1e-13)
        torch.testing.assert_close(state[b], last[0], rtol=0, atol=1e-13)
    assert not output[~MASK].any()


@pytest.mark.parametrize("name", RULES)
def test_a_sequence_continues_from_the_state_of_its_first_part(name):
    """A step of decoding is a recurrence of one token; a prompt may come in chunks."""
    inputs, start = create_inputs(name), create_start()
    whole, last = get_recurrence(name)(inputs, start)
    _, state = get_chunked(name)(slice_tokens(inputs, 0, T - 1), start)
    step, state = get_recurrence(name)(slice_tokens(inputs, T - 1, T), state)
    torch.testing.assert_close(step[:, 0], whole[:, -1], rtol=0, atol=1e-13)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-13)


def slice_tokens(inputs, begin, end):
    places = inputs.q.shape[1]

    def cut(x):
        count = x.shape[1] // places
        return x[:, begin * count : end * count]

    return rebuild(inputs, cut)


FORMS = [
    CoreOptions(chunk=8),
    CoreOptions(chunk=4, solver="ladder16"),
    CoreOptions(chunk=64, solver="rows", loop="unrolled"),
    # Six chunks and seven of nothing behind them, in parts of three at the same time.
    CoreOptions(chunk=4, parts=3),
]


@pytest.mark.parametrize("products", BOUNDS)
@pytest.mark.parametrize("name", RULES)
def test_errors_of_products_follow_the_bits_of_their_parts(name, products):
    inputs, start = create_inputs(name, dtype=torch.float32), create_start(torch.float32)
    wide = rebuild(inputs, torch.Tensor.double)
    wanted = find_gradients(get_recurrence(name), wide, start.double())
    least, most = BOUNDS[products]
    for loop, parts in (("scan", 1), ("unrolled", 1), ("scan", 3)):
        options = CoreOptions(chunk=4, products=products, loop=loop, parts=parts)
        found = find_gradients(get_chunked(name), inputs, start, options=options)
        error = find_largest_error(found, wanted)
        assert least < error < most, f"{loop} in {parts}: {error:.1e}"
        assert found["state"].dtype == torch.float32
    # Numbers of 64 bits are no sums of three of 8.
    found = find_gradients(get_chunked(name), wide, start.double(), options=options)
    assert find_largest_error(found, wanted) < 1e-12


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_the_chunked_form_equals_the_recurrence_and_its_gradients(name, packed):
    inputs, start = create_inputs(name), create_start()
    kwargs = {"segments": SEGMENTS, "mask": MASK} if packed else {}
    wanted = find_gradients(get_recurrence(name), inputs, start, **kwargs)
    for options in FORMS:
        found = find_gradients(get_chunked(name), inputs, start, options=options, **kwargs)
        assert find_largest_error(found, wanted) < 1e-13, options


@pytest.mark.parametrize("name", ["gdn", "kda", "gdn2", "rwkv7"])
def test_sub_blocks_of_a_chunk_equal_the_recurrence(name):
    """Chunks of 64 are four sub-blocks, which halves join twice."""
    inputs, start = create_inputs(name, tokens=66), create_start()
    wanted = find_gradients(get_recurrence(name), inputs, start)
    for solver in SOLVERS:
        options = CoreOptions(chunk=64, solver=solver)
        found = find_gradients(get_chunked(name), inputs, start, options=options)
        assert find_largest_error(found, wanted) < 1e-13, solver


@pytest.mark.parametrize("name", RULES)
def test_float32_errors_are_a_few_roundings_like_the_recurrences(name):
    """Ten times at most, of errors that are a few roundings."""
    exact = create_inputs(name, tokens=90)
    inputs, start = rebuild(exact, torch.Tensor.float), create_start(torch.float32)
    exact = rebuild(inputs, torch.Tensor.double)
    wanted = find_gradients(get_recurrence(name), exact, start.double())
    plain = find_gradients(get_recurrence(name), inputs, start)
    found = find_gradients(get_chunked(name), inputs, start)
    assert find_largest_error(found, wanted) < 10 * find_largest_error(plain, wanted) < 1e-4


@pytest.mark.parametrize("solver", SOLVERS)
def test_an_inverse_of_large_entries_avoids_overflowing_powers(solver):
    """Entries of 3 and 64 rows: powers of them reach 1e30, the inverse of this one does not."""
    lower = torch.zeros(64, 64, dtype=torch.float64)
    place = torch.arange(63)
    lower[place + 1, place] = torch.where(place % 2 == 0, 3.0, 0.25).double()
    found = invert(lower, solver) @ (torch.eye(64, dtype=torch.float64) + lower)
    torch.testing.assert_close(found, torch.eye(64, dtype=torch.float64), rtol=0, atol=1e-10)


def test_bfloat16_is_computed_in_float32_under_autocast_too():
    inputs = rebuild(create_inputs("kda"), lambda x: x.to(torch.bfloat16))
    wanted, last = chunk_delta_rule(rebuild(inputs, torch.Tensor.float))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, state = chunk_delta_rule(inputs)
    assert output.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    assert torch.equal(output, wanted.to(torch.bfloat16))
    assert torch.equal(state, last)


def test_the_backward_pass_keeps_only_inputs_inverse_and_states():
    """As the module says: C numbers of a token and head, and K V / C; no pair has channels."""
    inputs = rebuild(create_inputs("kda", tokens=64), lambda x: x.float().requires_grad_())
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        chunk_delta_rule(inputs, options=CoreOptions(chunk=16))
    own = sum(x.numel() for x in list_tensors(inputs).values())
    rule = B * H * 64 * 16 + B * H * 4 * K * V
    # The gates, floored and given a fourth dimension, are kept where they were floored, too.
    assert own + rule <= sum(x.numel() for x in kept) <= own + rule + 2 * inputs.g.numel()


def create_published(name, tokens):
    """Inputs of a layer at its published first values, in float32, width 8."""
    inputs = rebuild(create_inputs(name, tokens=tokens), torch.Tensor.float)
    draw = torch.Generator().manual_seed(5)
    if name in ("gdn", "delta_product", "kda", "gdn2"):
        rate = 16 * torch.rand(H, generator=draw)
        shape = inputs.g.shape
        x = torch.randn(shape, generator=draw) + 1.0
        rate = rate if len(shape) == 3 else rate[:, None]
        return replace(inputs, g=-rate * softplus(x))
    if name == "rwkv7":
        ramp = -6 + 6 * torch.linspace(0, 1, K)
        return replace(inputs, g=-math.exp(-0.5) * torch.sigmoid(ramp).expand_as(inputs.g))
    return inputs


@pytest.mark.parametrize("name", RULES)
def test_gradients_are_finite_at_the_published_initialisation(name):
    inputs = create_published(name, 192)
    found = find_gradients(get_chunked(name), inputs, create_start(torch.float32))
    assert all(value.isfinite().all() for value in found.values())


@pytest.mark.parametrize("gate", [0.0, -90.0, -math.inf])
@pytest.mark.parametrize("name", RULES)
def test_gates_of_zero_and_of_one_give_finite_values(name, gate):
    inputs = rebuild(create_inputs(name, tokens=20), torch.Tensor.float)
    every = replace(inputs, g=torch.full_like(inputs.g, gate))
    mixed = inputs.g.clone()
    mixed[:, 2::5] = gate
    some = replace(inputs, g=mixed)
    start = create_start(torch.float32)
    for one in (every, some):
        found = find_gradients(get_chunked(name), one, start, options=FORMS[0])
        assert all(value.isfinite().all() for value in found.values())
        exact = rebuild(one, torch.Tensor.double)
        output, state = get_recurrence(name)(exact, start.double())
        scale = float(output.abs().max())
        torch.testing.assert_close(found["output"].double(), output, rtol=0, atol=1e-5 * scale)
        torch.testing.assert_close(found["state"].double(), state, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("name", ["gdn", "kda", "rwkv7"])
def test_a_strong_gates_gradient_exceeds_rounding_errors(name):
    """Of e^-14 and less: x dx - y dy, summed over the chunk, would be noise of 1e-6."""
    inputs = rebuild(create_inputs(name, tokens=40), torch.Tensor.float)
    inputs = replace(inputs, g=inputs.g - 14.0)
    start, exact = create_start(torch.float32), rebuild(inputs, torch.Tensor.double)
    wanted = find_gradients(get_recurrence(name), exact, start.double())["g"]
    found = find_gradients(get_chunked(name), inputs, start)["g"].double()
    assert wanted.abs().max() < 1e-4
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-5


def test_the_naive_form_of_channel_decay_overflows_where_ours_is_finite():
    """(K e^c)(K e^-c)^T overflows within a chunk of gates as layers begin with."""
    inputs = create_published("kda", 64)
    g = inputs.g.detach().requires_grad_()
    sums = g.cumsum(dim=1)
    naive = torch.einsum("bihk,bjhk->bhij", inputs.k * sums.exp(), inputs.k * (-sums).exp())
    naive.tril().sum().backward()
    assert not g.grad.isfinite().all()
    ours = find_gradients(chunk_delta_rule, inputs, create_start(torch.float32))
    assert ours["g"].isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_32768_tokens_are_finite_and_equal_the_recurrence(name):
    inputs = create_published(name, 32768)
    found = find_gradients(get_chunked(name), inputs, create_start(torch.float32))
    assert all(value.isfinite().all() for value in found.values())
    with torch.no_grad():
        exact, start = rebuild(inputs, torch.Tensor.double), create_start()
        output, state = get_recurrence(name)(exact, start.float().double())
    assert float((found["output"] - output).abs().max() / output.abs().max()) < 2e-5
    assert float((found["state"] - state).abs().max() / state.abs().max()) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("gate", [0.0, -90.0])
@pytest.mark.parametrize("name", RULES)
def test_32768_tokens_with_gates_of_zero_or_one_are_finite(name, gate):
    inputs = rebuild(create_published(name, 32768), lambda x: x[:1])
    inputs = replace(inputs, g=torch.full_like(inputs.g, gate))
    found = find_gradients(get_chunked(name), inputs, create_start(torch.float32)[:1])
    assert len(found) > 5 and all(value.isfinite().all() for value in found.values())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: CoreOptions(chunk=48), "chunk (48) must be a power of two from 2 to 256"),
        (lambda x: CoreOptions(solver="lu"), "solver ('lu') is unknown; use one of auto, tri"),
        (lambda x: CoreOptions(products="fp8"), "products ('fp8') is unknown; use one of auto, b"),
        (
            lambda x: CoreOptions(products="bfloat16", kernels="pallas"),
            "products (bfloat16) is not supported with kernels (pallas)",
        ),
        (lambda x: CoreOptions(parts=0), "parts (0) must be a whole number, 1 or more"),
        (lambda x: CoreOptions(loop="while"), "loop ('while') is unknown; use one of auto, scan"),
        (lambda x: chunk_delta_rule(x, options=CoreOptions(8, pad=False)), "21 tokens are no mul"),
        (lambda x: chunk_delta_rule(x, torch.zeros(2, 2, 3, 4)), "a state of shape [2, 2, 3, 4] d"),
        (lambda x: recur_delta_rule(x, torch.zeros(1)), "a state of shape [1] does not fit"),
        (lambda x: replace(x, g=x.g[:, :3]), "g has the shape [2, 3, 2, 4], not [2, 21, 2] or"),
        (lambda x: replace(x, steps=2), "v has 21 tokens, but q has 21 with 2 steps each"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_in_one_line(call, message):
    with pytest.raises(UserError) as caught:
        call(create_inputs("kda"))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [get_recurrence, get_chunked])
@pytest.mark.parametrize("name", ["kda", "delta_product", "rwkv7"])
def test_segments_and_masks_of_other_shapes_are_refused_in_one_line(name, kind):
    """Segments and masks of other shapes than the tokens', as steps may make of them."""
    rule, inputs = kind(name), create_inputs(name)
    for shape in ((B, 5), (T,), (B, 2 * T), (B, T, 1), ()):
        value = torch.zeros(shape, dtype=torch.int64)
        for key, given in (("segments", value), ("mask", value.bool())):
            with pytest.raises(UserError) as caught:
                rule(inputs, **{key: given})
            assert str(caught.value) == (
                f"{key} has the shape {list(value.shape)}, not [2, 21] [B, T]; give one entry a "
                "token"
            )
    with pytest.raises(UserError, match=r"^mask is of torch\.float32, not torch\.bool; give True"):
        rule(inputs, mask=torch.ones(B, T))
    with pytest.raises(UserError) as caught:
        rule(create_inputs(name, tokens=0))
    assert str(caught.value) == (
        "q has the shape [2, 0, 2, 4], not [B, T, H, K] with T of 1 or more; give a token at least"
    )


def test_heads_of_keys_must_divide_those_of_values():
    inputs = create_inputs("gdn")
    three = {"q": inputs.q.repeat(1, 1, 3, 1), "k": inputs.k.repeat(1, 1, 3, 1)}
    with pytest.raises(UserError, match="3 heads of q and k do not divide the 2 of v"):
        DeltaInputs(**{**list_tensors(inputs), **three})
