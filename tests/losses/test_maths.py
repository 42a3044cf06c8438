"""Closed forms and identities between the losses."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from losses.base import SparseTeacher, compute_dense_log_probs
from losses.factory import create_loss
from losses.features.hints import create_projection, pool_adaptive
from losses.logits.decoupled import compute_dkd_parts
from losses.logits.kd import kd_kl_div
from losses.logits.matching import compute_dist_parts
from losses.noise import draw_uniform
from losses.relations.contrastive import compute_scores
from losses.relations.similarities import compute_kernel, compute_rkd_parts
from losses.relations.views import compute_low_share
from tests.losses.examples import create_example_loss, create_inputs


def compute(name, inputs, **args):
    return create_loss(name, args)(inputs)


def get_gradient(name, inputs, **args):
    return torch.autograd.grad(compute(name, inputs, **args), inputs.student_logits)[0]


def test_kd_of_two_classes_is_the_closed_form():
    student, teacher = torch.tensor([[0.0, 0.0]]), torch.tensor([[2 * math.log(3.0), 0.0]])
    want = 4 * (0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert kd_kl_div(student, teacher, 2.0).item() == pytest.approx(want, rel=1e-6)


def test_kd_gradient_is_the_difference_of_probabilities():
    inputs = create_inputs("kd")
    student, teacher = inputs.student_logits, inputs.teacher_logits[0]
    gap = torch.softmax(student / 3, dim=-1) - torch.softmax(teacher / 3, dim=-1)
    torch.testing.assert_close(get_gradient("kd", inputs, temperature=3.0), 3 * gap / 4)


def test_cross_entropy_form_has_the_gradient_of_the_kl_form():
    inputs = create_inputs("kd")
    torch.testing.assert_close(
        get_gradient("kd", inputs, form="cross_entropy"), get_gradient("kd", inputs)
    )


def test_kd_is_tckd_plus_the_non_target_mass_times_nckd():
    inputs = create_inputs("dkd", batch=1)
    student, teacher = inputs.student_logits, inputs.teacher_logits[0]
    tckd, nckd = compute_dkd_parts(student, teacher, inputs.labels, 2.0)
    rest = 1 - torch.softmax(teacher / 2, dim=-1)[0, inputs.labels]
    torch.testing.assert_close((tckd + rest * nckd)[0], kd_kl_div(student, teacher, 2.0))


def test_deit_hard_is_hard_kd_on_the_distillation_token():
    inputs = create_inputs("deit_hard")
    swapped = replace(inputs, student_logits=inputs.student_distill_logits)
    torch.testing.assert_close(compute("deit_hard", inputs), compute("hard", swapped))


def test_smoothed_hard_labels_follow_torch():
    inputs = create_inputs("hard")
    want = torch.nn.functional.cross_entropy(
        inputs.student_logits, inputs.teacher_logits[0].argmax(dim=-1), label_smoothing=0.2
    )
    torch.testing.assert_close(compute("hard", inputs, label_smoothing=0.2), want)


def test_bv_hard_without_smoothing_is_hard_kd():
    inputs = create_inputs("hard")
    torch.testing.assert_close(compute("bv_hard", inputs), compute("hard", inputs))


def test_ofa_with_exponent_one_is_soft_cross_entropy():
    inputs = create_inputs("ofa")
    want = compute("kd", inputs, temperature=1.0, form="cross_entropy")
    torch.testing.assert_close(compute("ofa", inputs), want)


def test_lskd_wraps_any_logit_loss_and_ignores_scale_and_shift():
    inputs = create_inputs("lskd")
    args = {"loss": "dkd", "loss_args": {"beta": 2.0}}
    value = compute("lskd", inputs, **args)
    torch.testing.assert_close(value, compute("lskd_dkd", inputs, beta=2.0))
    moved = replace(inputs, teacher_logits=(5 * inputs.teacher_logits[0] + 3,))
    torch.testing.assert_close(compute("lskd", moved, **args), value)


def test_dist_is_zero_for_affinely_related_probabilities():
    logits = create_inputs("dist").teacher_logits[0].double()
    inter, intra = compute_dist_parts(logits, logits + 2.0, 1.0)
    assert abs(inter) < 1e-6 and abs(intra) < 1e-6


def test_mean_of_losses_has_the_gradient_of_the_mean_of_probabilities():
    inputs = create_inputs("multi_avg_loss")
    torch.testing.assert_close(
        get_gradient("multi_avg_loss", inputs), get_gradient("multi_avg_prob", inputs)
    )
    assert compute("multi_avg_loss", inputs) > compute("multi_avg_prob", inputs)


def test_sum_over_teachers_is_their_number_times_the_mean():
    inputs = create_inputs("multi_sum")
    torch.testing.assert_close(compute("multi_sum", inputs), 2 * compute("multi_avg_loss", inputs))


def test_rkd_ignores_scale_shift_and_rotation():
    numbers = torch.Generator().manual_seed(0)
    embeddings = torch.randn(1, 6, 4, generator=numbers, dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(4, 4, generator=numbers, dtype=torch.float64))[0]
    weights = torch.ones(1, 6, dtype=torch.float64)
    distance, angle = compute_rkd_parts(3 * embeddings @ rotation + 1, embeddings, weights)
    assert distance < 1e-20 and angle < 1e-20


@pytest.mark.parametrize("size", [(8, 8), (7, 5), (6, 9)])
@pytest.mark.parametrize("output", [(4, 4), (2, 2), (1, 1), (3, 5)])
def test_pooling_equals_torchs_adaptive_average(size, output):
    maps = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    want = torch.nn.functional.adaptive_avg_pool2d(maps, output)
    torch.testing.assert_close(pool_adaptive(maps, *output), want)


@pytest.mark.parametrize(
    ("student", "teacher"),
    [
        ((6, 8, 8), (4, 4, 4)),
        ((6, 4, 4), (4, 8, 8)),
        ((6, 9, 9), (4, 7, 7)),
        ((6, 5, 5), (4, 5, 5)),
    ],
)
def test_convolutional_projections_give_the_teachers_shape(student, teacher):
    projection = create_projection((2, *student), (2, *teacher), "convreg")
    assert projection(torch.zeros(2, *student)).shape == (2, *teacher)


def test_tokens_are_projected_by_a_linear_layer():
    loss = create_loss("fitnet", {"layers": {"blocks.0": "blocks.1"}})
    loss.build({"blocks.0": (1, 9, 4)}, {"blocks.1": (1, 9, 6)})
    assert [tuple(p.shape) for p in loss.parameters()] == [(6, 4)]


@pytest.mark.parametrize(
    ("scores", "share"), [([3.0, 1.0, 2.0], 2 / 3), ([1.0, 2.0, 3.0, 4.0], 0.5), ([1.0] * 4, 1.0)]
)
def test_low_share_follows_numpys_median(scores, share):
    scores = torch.tensor([scores])
    assert compute_low_share(scores, torch.ones_like(scores).bool()).item() == pytest.approx(share)


def test_crd_moves_the_memories_of_valid_examples_only():
    inputs = create_inputs("crd")
    inputs = replace(inputs, mask=torch.tensor([True, True, False, False]))
    loss = create_loss(
        "crd", {"layers": {"stage.1": "layer.2"}, "num_examples": 12, "embed_dim": 4}
    )
    loss.build({"stage.1": (1, 5, 4, 4)}, {"layer.2": (1, 5, 4, 4)})
    before = loss.student_memory.clone()
    loss(inputs)
    moved = (loss.student_memory != before).any(dim=1)
    assert moved.tolist() == [True, True] + [False] * 10
    torch.testing.assert_close(loss.student_memory[:2].norm(dim=1), torch.ones(2))
    assert loss.student_normaliser > 0


def store(logits, count):
    """A float16 answer with the `count` best classes."""
    top = torch.log_softmax(logits, dim=-1).topk(count, dim=-1)
    residual = 1 - top.values.exp().sum(dim=-1)
    return SparseTeacher(top.values.half(), top.indices, residual.clamp(min=0))


@pytest.mark.parametrize("name", ["kd", "dkd", "dist", "lskd_kd", "ofa", "ttm", "hard"])
def test_a_cache_of_full_width_equals_the_live_teacher_within_float16(name):
    inputs = create_inputs(name)
    stored = store(inputs.teacher_logits[0], 7)
    replayed = replace(inputs, teacher_logits=(), sparse_teacher=stored)
    torch.testing.assert_close(compute(name, replayed), compute(name, inputs), rtol=5e-3, atol=1e-3)


def test_the_sparse_loss_of_full_width_is_the_cross_entropy_form():
    inputs = create_inputs("kd")
    stored = replace(inputs, sparse_teacher=store(inputs.teacher_logits[0], 7))
    want = compute("kd", inputs, form="cross_entropy", temperature=1.0)
    torch.testing.assert_close(compute("tinyvit_sparse", stored), want, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("count", [1, 3, 6])
def test_a_narrow_caches_error_is_bounded_by_its_residual(count):
    inputs = create_inputs("kd")
    stored = store(inputs.teacher_logits[0], count)
    exact = compute("kd", inputs, form="cross_entropy", temperature=1.0)
    value = compute("tinyvit_sparse", replace(inputs, sparse_teacher=stored))
    log_probs = torch.log_softmax(inputs.student_logits, dim=-1)
    span = log_probs.amax(dim=-1) - log_probs.amin(dim=-1)
    assert (value - exact).abs() <= (stored.residual * span).mean() + 5e-3


def test_sparse_and_dense_forms_of_a_stored_teacher_agree():
    inputs = replace(create_inputs("kd"), teacher_logits=())
    value = compute("tinyvit_sparse", inputs)
    dense = compute("kd", inputs, form="cross_entropy", temperature=1.0)
    torch.testing.assert_close(value, dense)
    rows = compute_dense_log_probs(inputs.sparse_teacher, 7).exp().sum(dim=-1)
    torch.testing.assert_close(rows, torch.ones(4))


def test_crd_draws_the_requested_negatives_from_the_whole_split(monkeypatch):
    seen = []

    def note(embeddings, rows, temperature):
        seen.append(rows)
        return compute_scores(embeddings, rows, temperature)

    monkeypatch.setattr("losses.relations.contrastive.compute_scores", note)
    inputs = replace(create_inputs("crd"), contrast_indices=None)
    loss = create_example_loss("crd", negatives=500)
    memories = loss.teacher_memory.clone(), loss.student_memory.clone()
    loss(inputs)
    for rows, memory in zip(seen, memories, strict=True):
        assert rows.shape[:2] == (4, 501)
        assert torch.equal(rows[:, 0], memory[inputs.example_indices])
        assert len(rows[:, 1:].flatten(0, 1).unique(dim=0)) == len(memory)


@given(st.floats(0.05, 1.5), st.lists(st.floats(-3, 3), min_size=6, max_size=6))
def test_the_series_of_unit_rows_is_the_gaussian_kernel(gamma, numbers):
    rows = torch.tensor(numbers, dtype=torch.float64).view(1, 3, 2) + 4.0
    rows = rows / rows.norm(dim=-1, keepdim=True)
    found = compute_kernel(rows, kernel="gaussian", gamma=gamma, max_power=30)
    torch.testing.assert_close(found, torch.exp(-gamma * torch.cdist(rows, rows) ** 2))
    second = compute_kernel(rows, kernel="gaussian", gamma=gamma, max_power=2)
    products = 2 * gamma * (rows @ rows.transpose(1, 2))
    want = math.exp(-2 * gamma) * (1 + products + products**2 / 2)
    torch.testing.assert_close(second, want)


def test_mask_numbers_depend_on_step_and_example_and_are_uniform():
    indices, key = torch.arange(200), torch.tensor([77])
    drawn = draw_uniform(indices, key, 64)
    assert torch.equal(draw_uniform(indices[50:60], key, 64), drawn[50:60])
    assert drawn.min() >= 0 and drawn.max() < 1
    counts = torch.histc(drawn, bins=16, min=0, max=1)
    assert ((counts - 800).square() / 800).sum() < 40  # chi-squared, 15 degrees: p = 0.0004
    others = (draw_uniform(indices, key + 1, 64), drawn.roll(1, 0), drawn.roll(1, 1))
    for other in others:
        together = torch.corrcoef(torch.stack([drawn.flatten(), other.flatten()]))[0, 1]
        assert together.abs() < 0.035  # four deviations of 12800 pairs
