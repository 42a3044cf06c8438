"""Values by their definitions, for losses and parts that reference files leave open."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from losses.factory import create_loss
from losses.features.heads import compute_transport
from losses.logits.standardise import standardise_logits
from losses.reductions import mean_groups
from losses.relations.contrastive import UnitEmbedding
from losses.relations.similarities import compute_kernel
from tests.losses.examples import create_example_loss, create_inputs

QUICK = settings(max_examples=25)
LAYERS = {"layers": {"stage.1": "layer.2"}}


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def compute_features(name: str, student: Tensor, teacher: Tensor, **args) -> Tensor:
    """A feature loss of two activations."""
    loss = create_loss(name, LAYERS | args)
    shapes = {"stage.1": tuple(student.shape)}, {"layer.2": tuple(teacher.shape)}
    loss.build(*shapes)
    inputs = replace(
        create_inputs(name, batch=len(student)),
        student_features={"stage.1": student},
        teacher_features={"layer.2": teacher},
    )
    return loss(inputs)


@QUICK
@given(seed=st.integers(0, 1000), group=st.sampled_from([2, 3, 6]))
def test_cckd_is_the_norm_of_the_gram_difference_and_the_papers_its_square(seed, group):
    student, teacher = draw(seed, 6, 4), draw(seed + 1, 6, 4)
    gaps = [
        (s @ s.T - t @ t.T).square().sum()
        for s, t in zip(student.split(group), teacher.split(group), strict=True)
    ]
    wanted = torch.stack(gaps)
    found = compute_features("cckd_paper", student, teacher, group_size=group)
    torch.testing.assert_close(found, (wanted / group**2).mean())
    found = compute_features("cckd", student, teacher, group_size=group)
    torch.testing.assert_close(found, (wanted.sqrt() / group**2).mean())


@QUICK
@given(seed=st.integers(0, 1000), gamma=st.floats(0.1, 1.0))
def test_the_kernels_series_converges_to_the_gaussian(seed, gamma):
    rows = torch.nn.functional.normalize(draw(seed, 1, 5, 3), dim=-1)
    distances = (rows.unsqueeze(1) - rows.unsqueeze(2)).square().sum(dim=-1)
    found = compute_kernel(rows, kernel="gaussian", gamma=gamma, max_power=30)
    torch.testing.assert_close(found, torch.exp(-gamma * distances))


@pytest.mark.parametrize("max_power", [1, 2, 3, 4])
def test_the_kernels_series_stops_at_max_power(max_power):
    rows = torch.nn.functional.normalize(draw(0, 1, 4, 3), dim=-1)
    products = 0.8 * rows @ rows.transpose(1, 2)
    terms = [products**power / math.factorial(power) for power in range(max_power + 1)]
    found = compute_kernel(rows, kernel="gaussian", gamma=0.4, max_power=max_power)
    torch.testing.assert_close(found, math.exp(-0.8) * sum(terms))


@QUICK
@given(
    rows=st.lists(
        st.tuples(st.floats(-9, 9), st.lists(st.booleans(), min_size=4, max_size=4)),
        min_size=1,
        max_size=5,
    )
)
def test_groups_are_weighted_by_their_valid_examples(rows):
    values = torch.tensor([value for value, _ in rows], dtype=torch.float64)
    weights = torch.tensor([valid for _, valid in rows], dtype=torch.float64)
    valid = [value for value, marks in rows for mark in marks if mark]
    wanted = sum(valid) / len(valid) if valid else 0.0
    assert float(mean_groups(values, weights)) == pytest.approx(wanted, abs=1e-9)


@QUICK
@given(seed=st.integers(0, 1000), tokens=st.integers(2, 6))
def test_attention_maps_of_tokens_are_normalised_over_tokens(seed, tokens):
    """Widths differ, and so do the two axes: only the channels may be averaged away."""
    student, teacher = draw(seed, 3, tokens, 4), draw(seed + 1, 3, tokens, 7)
    maps = [
        torch.nn.functional.normalize(side.square().mean(dim=-1), dim=1)
        for side in (student, teacher)
    ]
    wanted = (maps[0] - maps[1]).square().mean()
    torch.testing.assert_close(compute_features("at", student, teacher), wanted)


def test_embeddings_of_crd_have_unit_length():
    embedding = UnitEmbedding(5, 3)
    rows = embedding(7 * torch.randn(4, 5))
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(4))


@pytest.mark.parametrize("momentum", [0.1, 0.9])
def test_a_memory_keeps_the_share_given_by_momentum(momentum):
    student, teacher = (
        torch.nn.functional.normalize(draw(seed, 4, 6).float(), dim=1) for seed in (0, 1)
    )
    args = {"num_examples": 12, "embed_dim": 0, "negatives": 3, "momentum": momentum}
    loss = create_loss("crd", LAYERS | args)
    loss.build({"stage.1": (1, 6)}, {"layer.2": (1, 6)})
    before = loss.student_memory.clone(), loss.teacher_memory.clone()
    inputs = replace(
        create_inputs("crd"),
        student_features={"stage.1": student},
        teacher_features={"layer.2": teacher},
    )
    loss(inputs)
    after = loss.student_memory, loss.teacher_memory
    for rows, moved, mine in zip(before, after, (student, teacher), strict=True):
        wanted = momentum * rows[:4] + (1 - momentum) * mine
        torch.testing.assert_close(moved[:4], torch.nn.functional.normalize(wanted, dim=1))
        assert torch.equal(moved[4:], rows[4:])


@pytest.mark.parametrize("ratio", [0.25, 0.9])
def test_a_mask_hides_the_requested_share_of_whole_positions(ratio):
    loss = create_loss("mgd", LAYERS | {"mask_ratio": ratio})
    shape = (2, 3, 64, 64)
    loss.build({"stage.1": shape}, {"layer.2": shape})
    loss.generations[0] = torch.nn.Identity()
    inputs = replace(
        create_inputs("mgd", batch=2),
        student_features={"stage.1": torch.ones(shape)},
        teacher_features={"layer.2": torch.zeros(shape)},
    )
    keys = (torch.tensor([number]) for number in (3, 4))
    first, second = (loss(replace(inputs, noise_key=key)).item() for key in keys)
    assert first != second
    assert first % 3 == pytest.approx(0, abs=2)  # all channels of a position at once
    assert first / (3 * 64 * 64) == pytest.approx(1 - ratio, abs=0.02)


def test_transport_with_unit_costs_is_the_total_variation():
    """All costs but the diagonal are 1: the Wasserstein distance is the total variation."""
    first, second = (torch.softmax(draw(seed, 5, 6), dim=-1) for seed in (0, 1))
    costs = 1 - torch.eye(6, dtype=torch.float64)
    found = compute_transport(first, second, costs, entropy=0.05, iterations=400)
    torch.testing.assert_close(found, (first - second).abs().sum(dim=1) / 2, rtol=2e-3, atol=0)
    same = compute_transport(first, first, costs, entropy=0.05, iterations=400)
    assert same.abs().max() < 1e-6


@pytest.mark.parametrize(("calls", "pressure"), [(0, 0.0), (5, 0.5), (10, 1.0), (99, 1.0)])
def test_the_learnt_temperature_ascends_the_loss_by_a_cosine_schedule(calls, pressure):
    logits = draw(0, 4, 7).requires_grad_()
    inputs = replace(
        create_inputs("ctkd"), student_logits=logits, teacher_logits=(3 * draw(1, 4, 7),)
    )
    loss = create_loss("ctkd", {"curriculum_steps": 10}).double()
    loss.calls.fill_(float(calls))

    def compute(raw: float) -> float:
        temperature = 1 + 20 / (1 + math.exp(-raw))
        return create_loss("kd", {"temperature": temperature})(inputs).item()

    loss(inputs).backward()
    slope = (compute(1.01) - compute(0.99)) / 0.02
    found = loss.raw_temperature.grad.item()
    assert found == pytest.approx(-pressure * slope, rel=1e-3, abs=1e-9)
    assert loss.calls.item() == calls + 1
    with torch.no_grad():
        loss(inputs)
    assert loss.calls.item() == calls + 1


@QUICK
@given(seed=st.integers(0, 1000), weights=st.tuples(st.floats(0.1, 9), st.floats(0.1, 9)))
def test_teachers_are_averaged_by_their_weights(seed, weights):
    student = draw(seed, 4, 7)
    teachers = draw(seed + 1, 4, 7), draw(seed + 2, 4, 7)
    shares = [weight / sum(weights) for weight in weights]
    inputs = replace(create_inputs("kd"), student_logits=student, teacher_logits=teachers)

    def kd(logits: Tensor) -> Tensor:
        return create_loss("kd", {"temperature": 2.0})(replace(inputs, teacher_logits=(logits,)))

    mean = sum(s * torch.softmax(t / 2, -1) for s, t in zip(shares, teachers, strict=True))
    wanted = {
        "multi_avg_prob": kd(2 * mean.log()),
        "multi_avg_logit": kd(sum(s * t for s, t in zip(shares, teachers, strict=True))),
        "multi_avg_loss": sum(s * kd(t) for s, t in zip(shares, teachers, strict=True)),
    }
    wanted["multi_sum"] = 2 * wanted["multi_avg_loss"]
    for name, value in wanted.items():
        found = create_loss(name, {"temperature": 2.0, "weights": weights})(inputs)
        torch.testing.assert_close(found, value, msg=name)


@QUICK
@given(seed=st.integers(0, 1000), scale=st.floats(0.5, 20), shift=st.floats(-9, 9))
def test_lskd_standardises_the_distillation_tokens_logits_too(seed, scale, shift):
    token, teacher = draw(seed, 4, 7), draw(seed + 1, 4, 7)
    inputs = replace(
        create_inputs("deit_soft"), student_distill_logits=token, teacher_logits=(teacher,)
    )
    loss = create_loss("lskd", {"loss": "deit_soft", "loss_args": {"temperature": 2.0}})
    plain = replace(
        inputs,
        student_logits=standardise_logits(token),
        teacher_logits=(standardise_logits(teacher),),
    )
    value = loss(inputs)
    torch.testing.assert_close(value, create_loss("kd", {"temperature": 2.0})(plain))
    moved = loss(replace(inputs, student_distill_logits=scale * token + shift))
    torch.testing.assert_close(moved, value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "inner", "args"),
    [
        ("lskd_kd", "kd", {"temperature": 2.0}),
        ("lskd_dkd", "dkd", {"temperature": 4.0, "alpha": 1.0, "beta": 8.0}),
    ],
)
def test_the_short_names_of_lskd_take_the_published_numbers(name, inner, args):
    inputs = create_inputs(inner)
    plain = replace(
        inputs,
        student_logits=standardise_logits(inputs.student_logits),
        teacher_logits=tuple(standardise_logits(one) for one in inputs.teacher_logits),
    )
    torch.testing.assert_close(create_loss(name)(inputs), create_loss(inner, args)(plain))


@pytest.mark.parametrize(
    ("name", "args", "wanted"),
    [
        ("kd", {}, False),
        ("deit_soft", {}, True),
        ("deit_hard", {}, True),
        ("lskd", {"loss": "deit_soft"}, True),
        ("lskd", {}, False),
        ("multi_avg_prob", {"loss": "deit_hard"}, True),
        ("multi_sum", {}, False),
    ],
)
def test_a_loss_declares_whether_it_uses_a_distillation_token(name, args, wanted):
    assert create_loss(name, args).needs_distill_token() is wanted


def test_scaled_attention_scores_equal_those_of_scaled_queries():
    inputs = create_inputs("scalekd")
    scaled, longer = create_example_loss("scalekd", score_scale=5.0), create_example_loss("scalekd")
    with torch.no_grad():
        for projector in longer.projectors["stage/0"]:
            projector.query.weight.mul_(5.0)
            projector.query.bias.mul_(5.0)
    torch.testing.assert_close(scaled(inputs), longer(inputs))
