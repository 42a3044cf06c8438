"""The memories of `crd` and `nd` are the same on every rank and with one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Barrier

import pytest
import torch

from losses.base import LossInputs, join_memories
from losses.factory import create_loss
from losses.noise import draw_words

EXAMPLES, WIDTH, BATCH = 40, 6, 8
ARGS = {"crd": {"num_examples": EXAMPLES, "negatives": 5, "embed_dim": 3}, "nd": {"num_classes": 4}}


class TwoRanks:
    """Two threads that gather as ranks do: each waits for the other's rows."""

    def __init__(self) -> None:
        self.rows, self.barrier = [None, None], Barrier(2, timeout=60)

    def gather(self, rank: int, rows: torch.Tensor) -> torch.Tensor:
        self.rows[rank] = rows.detach()
        self.barrier.wait()
        both = torch.cat(self.rows)
        self.barrier.wait()
        return both


def create(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    loss = create_loss(name, {"layers": {"s": "t"}, **ARGS[name]})
    loss.build({"s": (1, 5)}, {"t": (1, WIDTH)})
    return loss


def create_step(seed: int) -> LossInputs:
    numbers = torch.Generator().manual_seed(seed)
    student, teacher = (torch.randn(BATCH, width, generator=numbers) for width in (5, WIDTH))
    return LossInputs(
        student[:, :4],
        None,
        labels=torch.randint(4, (BATCH,), generator=numbers),
        mask=torch.arange(BATCH) < BATCH - 1,
        student_features={"s": student},
        teacher_features={"t": teacher},
        example_indices=torch.randperm(EXAMPLES, generator=numbers)[:BATCH],
        noise_key=torch.tensor([seed]),
    )


def cut(inputs: LossInputs, part: slice) -> LossInputs:
    return replace(
        inputs,
        student_logits=inputs.student_logits[part],
        labels=inputs.labels[part],
        mask=inputs.mask[part],
        example_indices=inputs.example_indices[part],
        student_features={"s": inputs.student_features["s"][part]},
        teacher_features={"t": inputs.teacher_features["t"][part]},
    )


@pytest.mark.parametrize("name", ["crd", "nd"])
def test_two_ranks_train_and_remember_like_one(name):
    whole, halves, ranks = create(name), [create(name), create(name)], TwoRanks()
    for number, loss in enumerate(halves):
        join_memories(loss, partial(ranks.gather, number))
    before = {key: value.clone() for key, value in whole.named_buffers()}
    with ThreadPoolExecutor(2) as pool:
        for seed in range(4):
            inputs = create_step(seed)
            parts = [cut(inputs, slice(0, 4)), cut(inputs, slice(4, 8))]
            counts = torch.tensor([4.0, 3.0])
            values = pool.map(lambda one, part: one(part), halves, parts)
            mean = (torch.stack(list(values)) * counts).sum() / counts.sum()
            torch.testing.assert_close(mean, whole(inputs))
    for key, value in whole.named_buffers():
        assert not torch.equal(value, before[key]), key
        one, other = (dict(loss.named_buffers())[key] for loss in halves)
        assert torch.equal(one, other), key
        torch.testing.assert_close(one, value)


def test_random_words_depend_on_example_and_key_not_on_the_batch():
    indices, key = torch.tensor([3, 1_281_166, 7]), torch.tensor([11])
    words = draw_words(indices, key, 500)
    assert torch.equal(draw_words(indices[1:2], key, 500), words[1:2])
    assert not torch.equal(draw_words(indices, key + 1, 500), words)
    assert words.min() >= 0 and words.max() < 2**32
    # Uniform below a size that divides nothing: the mean of 1500 within 4 standard errors.
    share = (words % 1197).double().mean() / 1196
    assert abs(share - 0.5) < 4 / (12 * 1500) ** 0.5
