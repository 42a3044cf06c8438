"""Batches map and split over the fields of any kind of batch; per-step values are shared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, replace

import pytest
import torch
from torch import Tensor

from datasets import Batch, ImageBatch, TokenBatch, VectorBatch

SIZE = 8
ROWS = torch.arange(SIZE)
BASE = {
    "mask": ROWS < 7,
    "indices": ROWS,
    "ids": tuple("abcdefgh"),
    "draws": {"share": ROWS.float()},
    "values": {"scales": torch.tensor([0.5, 2.0, 3.0])},
}


@dataclass(frozen=True, kw_only=True)
class PairBatch(Batch):
    """Two sentences each, and more of them in a mapping: a kind that the library does not know."""

    first: Tensor
    second: Tensor
    others: Mapping[str, Tensor]


KINDS = [
    Batch(**BASE),
    ImageBatch(**BASE, images=ROWS.view(-1, 1, 1, 1).to(torch.uint8), labels=ROWS.int()),
    TokenBatch(**BASE, tokens=ROWS.view(-1, 1).expand(-1, 5).int()),
    VectorBatch(**BASE, inputs=ROWS.view(-1, 1).float(), targets=ROWS.view(-1, 1).float()),
    PairBatch(**BASE, first=ROWS, second=ROWS.view(-1, 1), others={"third": ROWS}),
]


def list_examples(batch: Batch) -> dict[str, list[int]]:
    """List which examples each tensor holds, by name; each tensor holds its row number."""
    tensors = {n: t for n, t in vars(batch).items() if isinstance(t, Tensor) and n != "mask"}
    for name in ("draws", "others"):
        tensors |= getattr(batch, name, {})
    found = {
        name: tensor.flatten(1)[:, 0] if tensor.dim() > 1 else tensor
        for name, tensor in tensors.items()
    }
    return {name: tensor.int().tolist() for name, tensor in found.items()}


@pytest.mark.parametrize("batch", KINDS, ids=lambda batch: type(batch).__name__)
@pytest.mark.parametrize(
    ("blocks", "wanted"),
    [(1, [[0, 1], [2, 3], [4, 5], [6, 7]]), (2, [[0, 4], [1, 5], [2, 6], [3, 7]])],
)
def test_a_batch_splits_over_its_fields_within_each_block(batch, blocks, wanted):
    parts = batch.split(4, blocks)
    assert [type(part) for part in parts] == [type(batch)] * 4
    assert [len(part) for part in parts] == [2] * 4
    assert [part.is_last for part in parts] == [False, False, False, True]
    for part, rows in zip(parts, wanted, strict=True):
        assert set(map(tuple, list_examples(part).values())) == {tuple(rows)}
        assert part.ids == tuple("abcdefgh"[row] for row in rows)
        assert part.mask.tolist() == [row < 7 for row in rows]


@pytest.mark.parametrize("batch", KINDS, ids=lambda batch: type(batch).__name__)
def test_per_step_values_are_never_split(batch):
    for part in batch.split(2):
        assert part.values["scales"] is batch.values["scales"]


@pytest.mark.parametrize("batch", KINDS, ids=lambda batch: type(batch).__name__)
def test_map_visits_fields_and_per_step_values_separately(batch):
    doubled = batch.map(lambda tensor: tensor.repeat_interleave(2, 0))
    assert len(doubled) == 2 * SIZE and doubled.ids == batch.ids
    wanted = [row for row in range(SIZE) for _ in range(2)]
    assert all(rows == wanted for rows in list_examples(doubled).values())
    assert torch.equal(doubled.values["scales"], batch.values["scales"])
    moved = batch.map(lambda tensor: tensor, lambda tensor: -tensor)
    assert torch.equal(moved.values["scales"], -batch.values["scales"])


def test_a_nested_micro_batch_is_last_if_both_levels_are():
    parts = [part for half in KINDS[0].split(2) for part in half.split(2)]
    assert [part.is_last for part in parts] == [False, False, False, True]


def test_an_indivisible_batch_is_refused():
    with pytest.raises(AssertionError, match="8 examples for 3 parts of 1 blocks"):
        KINDS[0].split(3)
    with pytest.raises(AssertionError, match="4 parts of 4 blocks"):
        KINDS[0].split(4, blocks=4)


def test_batches_are_immutable_and_replace_adds_fields():
    batch = KINDS[0]
    with pytest.raises(FrozenInstanceError):
        batch.draws = {}
    other = replace(batch, draws={**batch.draws, "box": ROWS})
    assert set(other.draws) == {"share", "box"} and set(batch.draws) == {"share"}


@pytest.mark.parametrize("batch", KINDS, ids=lambda batch: type(batch).__name__)
def test_two_batches_are_concatenated_in_order(batch):
    first, second = batch.split(2)
    joined = first.append(replace(second, values={}))
    assert list_examples(joined) == list_examples(batch)
    assert joined.ids == batch.ids and torch.equal(joined.mask, batch.mask)
    assert joined.values is first.values
