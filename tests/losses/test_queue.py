"""The queue of `queue_kl`: first in, first out; the same for any number of ranks."""

from __future__ import annotations

import pytest
import torch

from losses.base import LossInputs, join_memories
from losses.factory import create_loss
from losses.reductions import unit_rows
from losses.relations.contrastive import push_rows
from utils.errors import UserError

WIDTH, SIZE = 5, 6


def create_queue(**args):
    loss = create_loss("queue_kl", {"layers": {"s": "t"}, "size": SIZE, **args})
    torch.manual_seed(0)
    loss.build({"s": (1, 3)}, {"t": (1, WIDTH)})
    return loss


def create_step(seed: int, batch: int = 4) -> LossInputs:
    numbers = torch.Generator().manual_seed(seed)
    student = torch.randn(batch, 3, generator=numbers).requires_grad_()
    teacher = torch.randn(batch, WIDTH, generator=numbers)
    return LossInputs(
        student, None, student_features={"s": student}, teacher_features={"t": teacher}
    )


def cut(inputs: LossInputs, part: slice) -> LossInputs:
    student = inputs.student_features["s"].detach()[part].requires_grad_()
    teacher = inputs.teacher_features["t"][part]
    return LossInputs(
        student, None, student_features={"s": student}, teacher_features={"t": teacher}
    )


def test_the_queue_holds_the_newest_examples_in_order():
    loss, pushed = create_queue(), []
    for seed in range(3):
        inputs = create_step(seed)
        loss(inputs)
        pushed = [*unit_rows(inputs.teacher_features["t"]), *pushed]
        places = min(SIZE, len(pushed))
        assert loss.memory.filled.tolist() == [True] * places + [False] * (SIZE - places)
        torch.testing.assert_close(loss.memory.rows[:places], torch.stack(pushed[:places]))


def test_a_batch_larger_than_the_queue_fills_it_with_its_first_examples():
    queue = push_rows(torch.zeros(2, 1), torch.tensor([[1.0], [2.0], [3.0]]))
    assert queue.tolist() == [[1.0], [2.0]]


def test_two_ranks_train_and_keep_the_queue_of_one():
    whole, halves = create_queue(), [create_queue(), create_queue()]
    for seed in range(3):
        inputs = create_step(seed)
        parts = [cut(inputs, slice(0, 2)), cut(inputs, slice(2, 4))]
        rows = torch.cat(
            [unit_rows(inputs.teacher_features["t"]), torch.ones(4, 1)], dim=1
        )  # what the sum over both ranks gives
        for loss in halves:
            join_memories(loss, lambda own, rows=rows: rows)
        values = torch.stack([loss(part) for loss, part in zip(halves, parts, strict=True)])
        torch.testing.assert_close(values.mean(), whole(inputs))
        for loss in halves:
            assert torch.equal(loss.memory.rows, whole.memory.rows)


def test_eval_mode_leaves_the_queue_unchanged():
    loss = create_queue()
    loss(create_step(0))
    before = loss.memory.rows.clone()
    loss.eval()(create_step(1))
    assert torch.equal(loss.memory.rows, before)


def test_a_checkpoint_holds_the_queue():
    loss, other = create_queue(), create_queue()
    loss(create_step(1))
    other.load_state_dict(loss.state_dict())
    assert torch.equal(other(create_step(2)), loss(create_step(2)))


@pytest.mark.parametrize(
    ("args", "rule"),
    [
        ({"size": 0}, "queue_kl.size is 0; give a number above 0"),
        ({"size": 2.5}, "queue_kl.size is 2.5; give a whole number"),
        (
            {"layers": {"a": "b", "c": "d"}},
            "one pair of layers and got 2; write a term for each pair",
        ),
        ({"queue_temperature": -1}, "queue_kl.queue_temperature is -1"),
    ],
)
def test_invalid_queue_arguments_are_refused(args, rule):
    with pytest.raises(UserError, match=rule.replace(".", r"\.")):
        create_queue(**args)
