"""Losses for language models: those that are a mean over rows of any kind."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from losses.factory import create_loss
from losses.logits.divergences import compute_generalised_jsd, compute_reverse_kl
from losses.logits.kd import kd_kl_div
from tests.losses.examples import ARGS, create_example_loss, create_inputs, map_examples
from utils.errors import UserError

ROWS = 12
# Their reason is not that they look at other rows, which the numbers below would show.
OTHER_REASONS = {
    "cat_kd",
    "crld",
    "ctkd",
    "deit_hard",
    "deit_soft",
    "fsp",
    "hcl",
    "mgd",
    "ofd",
    "wkd_l",
    "ft",
    "nd",
    "norm",
    "scalekd",
    "sdd",
    "simkd",
    "vitkd",
}
# Chunks of other sizes than their groups they do not take.
OF_ONE_SIZE = {"semckd"}


def compute_in_chunks(name, size, **changes):
    """Mean over all rows from the means of chunks of at most `size` rows."""
    inputs = create_inputs(name, batch=ROWS)
    total = 0.0
    for start in range(0, ROWS, size):
        rows = slice(start, min(start + size, ROWS))
        part = map_examples(inputs, lambda x, rows=rows: x[rows])
        total = total + create_example_loss(name)(part) * (rows.stop - start)
    return total / ROWS


def test_a_loss_of_groups_of_one_size_refuses_tokens():
    assert all(create_example_loss(name).why_not_tokens for name in OF_ONE_SIZE)


@pytest.mark.parametrize("name", sorted(ARGS.keys() - OF_ONE_SIZE))
def test_a_loss_is_a_mean_over_rows_or_declares_why_it_refuses_tokens(name):
    whole = compute_in_chunks(name, ROWS)
    values = [compute_in_chunks(name, size) for size in (1, 7)]
    if not create_example_loss(name).why_not_tokens:
        for value in values:
            torch.testing.assert_close(value, whole, rtol=2e-5, atol=1e-6)
    elif name not in OTHER_REASONS:
        assert not all(torch.allclose(value, whole, rtol=1e-3) for value in values)


def test_losses_of_rows_take_tokens():
    refused = {name for name in ARGS if create_example_loss(name).why_not_tokens}
    assert refused > OTHER_REASONS
    assert {"kd", "reverse_kl", "jsd", "dkd", "tinyvit_sparse", "fitnet"}.isdisjoint(refused)


def test_a_wrapper_takes_tokens_like_its_inner_loss():
    for wrapper in ("lskd", "multi_avg_loss", "multi_avg_prob", "multi_sum"):
        assert not create_loss(wrapper, {"loss": "dkd"}).why_not_tokens
        inner = create_loss("dist").why_not_tokens
        assert create_loss(wrapper, {"loss": "dist"}).why_not_tokens == inner


def draw_logits(seed=0):
    numbers = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(6, 5, generator=numbers, dtype=torch.float64)  # noqa: E731
    return 2 * draw().requires_grad_(), 2 * draw()


def test_reverse_kl_equals_torchs_with_exchanged_arguments():
    student, teacher = draw_logits()
    value = compute_reverse_kl(student, teacher, 2.0)
    logs = [functional.log_softmax(x / 2, dim=-1) for x in (teacher, student)]
    wanted = 4 * functional.kl_div(*logs, log_target=True, reduction="batchmean")
    torch.testing.assert_close(value, wanted)
    slopes = [torch.autograd.grad(x, student)[0] for x in (value, wanted)]
    torch.testing.assert_close(*slopes)


def test_the_generalised_jsd_is_symmetric_at_one_half_and_goes_to_both_kls():
    student, teacher = draw_logits()

    def compute(beta, first=student, second=teacher):
        return compute_generalised_jsd(first, second, 3.0, beta=beta)

    torch.testing.assert_close(compute(0.5), compute(0.5, teacher, student))
    torch.testing.assert_close(compute(0.2), compute(0.8, teacher, student))
    tiny = 1e-6
    torch.testing.assert_close(
        compute(tiny) / tiny, kd_kl_div(student, teacher, 3.0), rtol=1e-4, atol=0
    )
    reverse = compute_reverse_kl(student, teacher, 3.0)
    torch.testing.assert_close(compute(1 - tiny) / tiny, reverse, rtol=1e-4, atol=0)
    assert 0 < compute(0.5) < 9 * torch.tensor(2.0).log()
    assert compute(0.3, teacher, teacher).abs() < 1e-12


@pytest.mark.parametrize("beta", [0, 1, -0.5, "half"])
def test_a_beta_out_of_range_is_refused(beta):
    with pytest.raises(UserError, match=r"jsd\.beta is"):
        create_loss("jsd", {"beta": beta})
