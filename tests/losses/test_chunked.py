"""A head and its loss in chunks give the value and gradients of the undivided ones."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from losses.tasks.chunked import (
    choose_chunk,
    count_next_tokens,
    find_right_tokens,
    pick,
    score_in_chunks,
)

B, T, C, V = 3, 10, 6, 7


def create_tensors(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(B, T, C, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, C, generator=generator, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, V, (B, T), generator=generator, dtype=torch.int32)
    return hidden, weight, targets


@pytest.mark.parametrize("chunk", [1, 3, 5, 10])
def test_chunks_give_the_loss_and_the_gradients_of_all_logits(chunk):
    hidden, weight, targets = create_tensors(torch.float32)
    seen = []

    def score(logits, places):
        seen.append((places, tuple(logits.shape)))
        nats, _ = count_next_tokens(logits, targets[:, places])
        is_right = find_right_tokens(logits, targets[:, places])
        return nats.sum(), torch.stack([is_right.sum()])

    total, sums = score_in_chunks(hidden, weight, score, chunk)
    (2.5 * total).backward()
    found = [total.item(), hidden.grad.clone(), weight.grad.clone()]
    hidden.grad = weight.grad = None
    logits = hidden @ weight.T
    loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten().long(), reduction="sum")
    (2.5 * loss).backward()
    assert found[0] == pytest.approx(loss.item(), rel=1e-6)
    torch.testing.assert_close(found[1], hidden.grad)
    torch.testing.assert_close(found[2], weight.grad)
    assert sums.item() == (logits.argmax(-1) == targets).sum()
    assert not sums.requires_grad
    assert [places.start for places, _ in seen] == list(range(0, T, chunk))
    assert max(shape[1] for _, shape in seen) == chunk


def test_the_heads_gradient_does_not_depend_on_the_device_count():
    """Three examples on three devices, or on two, which do not divide them."""
    found = []
    for devices in (1, 2, 3):
        hidden, weight, targets = create_tensors(torch.float32)

        def score(logits, places, targets=targets):
            nats, _ = count_next_tokens(logits, targets[:, places])
            return nats.sum(), torch.zeros(1)

        total, _ = score_in_chunks(hidden, weight, score, 4, devices=devices)
        total.backward()
        found.append((total, hidden.grad, weight.grad))
    for values in found[1:]:
        torch.testing.assert_close(values, found[0])


def test_a_teacher_computes_logits_chunk_by_chunk():
    """The seam of distillation: a score makes another model's logits of the same places."""
    hidden, weight, _ = create_tensors(torch.float32)
    teacher, head = hidden.detach() + 0.5, weight.detach() * 2

    def score(logits, places):
        wanted = (teacher[:, places] @ head.T).log_softmax(-1)
        value = (wanted.exp() * (wanted - logits.log_softmax(-1))).sum()
        return value, value[None]

    total, sums = score_in_chunks(hidden, weight, score, 4)
    wanted, own = (teacher @ head.T).log_softmax(-1), (hidden @ weight.T).log_softmax(-1)
    whole = (wanted.exp() * (wanted - own)).sum()
    slopes = torch.autograd.grad(whole, (hidden, weight))
    for found, slope in zip(torch.autograd.grad(total, (hidden, weight)), slopes, strict=True):
        torch.testing.assert_close(found, slope)
    assert sums.item() == pytest.approx(whole.item(), rel=1e-5)


def test_without_gradients_nothing_is_kept():
    hidden, weight, _ = create_tensors(torch.float32)
    asked = []

    def score(logits, _):
        asked.append(logits.requires_grad)
        return logits.sum(), logits.sum()[None]

    with torch.no_grad():
        total, _ = score_in_chunks(hidden, weight, score, 4)
    assert total.grad_fn is None and not any(asked)


def test_half_precision_losses_use_float32_logits():
    hidden, weight, targets = create_tensors(torch.float32)
    kinds = []

    def score(logits, places):
        kinds.append(logits.dtype)
        return count_next_tokens(logits, targets[:, places])[0].sum(), logits.new_zeros(1)

    total, _ = score_in_chunks(hidden.bfloat16(), weight, score, 5)
    total.backward()
    assert set(kinds) == {torch.float32}
    assert weight.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("limit_mib", "chunk"), [(1000, 1024), (126, 512), (124, 342), (0.25, 1), (0.244, 0)]
)
def test_chunks_are_equal_and_as_large_as_the_limit_allows(limit_mib, chunk):
    """64 windows of a vocabulary of 1,000: 0.2441 MiB a place."""
    assert choose_chunk(64, 1024, 1000, limit_mib) == chunk
    assert chunk * 64 * 1000 * 4 <= limit_mib * 2**20


def test_picking_by_comparison_equals_gather():
    values = torch.arange(24.0).view(2, 3, 4)
    indices = torch.tensor([[0, 3, 1], [2, 2, 0]], dtype=torch.int32)
    wanted = values.gather(-1, indices.long()[..., None])[..., 0]
    assert torch.equal(pick(values, indices), wanted)
