"""The orders as pure functions: permutations, blocks, ranges, windows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from big_vision.input.order import (
    ShardedOrder,
    ShardSpec,
    get_evaluation_blocks,
    get_evaluation_range,
    get_exact_epoch,
    get_permutation,
)

SHARD_COUNTS = st.sampled_from([1, 2, 3, 8])


@given(count=st.integers(1, 300), seed=st.integers(0, 2**70), epoch=st.integers(0, 1000))
def test_a_permutation_holds_every_example_once(count, seed, epoch):
    assert np.array_equal(np.sort(get_permutation(count, seed, epoch)), np.arange(count))


def test_the_permutation_is_pinned_for_resumed_runs():
    assert get_permutation(8, seed=0, epoch=0).tolist() == PINNED
    assert get_permutation(8, seed=2**32, epoch=0).tolist() != PINNED


PINNED = [1, 2, 0, 6, 4, 5, 7, 3]


@given(
    shards=SHARD_COUNTS, rank_batch=st.integers(1, 6), total=st.integers(60, 200), data=st.data()
)
def test_exact_shards_concatenate_to_the_unsharded_batches(shards, rank_batch, total, data):
    size = shards * rank_batch
    start = data.draw(st.integers(0, total - 1))
    whole = get_exact_epoch(total, ShardSpec(0, 1, size), 5, 2, start)
    parts = [get_exact_epoch(total, ShardSpec(i, shards, size), 5, 2, start) for i in range(shards)]
    joined = np.stack([p.reshape(-1, rank_batch) for p in parts], axis=1).reshape(-1)
    assert np.array_equal(joined, whole)
    assert len(whole) == (total - start) // size * size
    assert np.array_equal(whole, get_permutation(total, 5, 2)[start : start + len(whole)])


@given(shards=SHARD_COUNTS, rank_batch=st.integers(1, 6), total=st.integers(1, 100))
def test_evaluation_covers_every_example_once(shards, rank_batch, total):
    specs = [ShardSpec(i, shards, shards * rank_batch) for i in range(shards)]
    blocks = np.concatenate([get_evaluation_blocks(total, spec) for spec in specs])
    assert sorted(blocks.tolist()) == list(range(total))
    ranges = [np.arange(*get_evaluation_range(total, spec)) for spec in specs]
    assert np.concatenate(ranges).tolist() == list(range(total))
    most = max(len(r) for r in ranges)
    assert -(-most // rank_batch) <= -(-total // (shards * rank_batch))


def create_order(shards: int, index: int, counts: list[int], window: int = 7) -> ShardedOrder:
    lengths = np.array(counts, np.int64)
    starts = np.cumsum(lengths) - lengths
    return ShardedOrder(starts, lengths, window, ShardSpec(index, shards, 2 * shards), seed=3)


def list_examples(stream) -> np.ndarray:
    """The examples of a stream's groups, in the order in which units are named."""
    pieces = stream.groups.reshape(-1, 3)
    parts = [np.arange(first, first + count) for _, first, count in pieces]
    return np.concatenate(parts)


@settings(max_examples=50)
@given(shards=SHARD_COUNTS, counts=st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_sharded_shards_read_equal_and_disjoint_parts(shards, counts):
    total = sum(counts)
    if total < 2 * shards:
        return
    streams = [create_order(shards, i, counts).get_epoch(4, 0) for i in range(shards)]
    seen = [list_examples(stream) for stream in streams]
    assert {len(part) for part in seen} == {total // shards}
    assert len(np.unique(np.concatenate(seen))) == total // shards * shards
    assert {stream.limit for stream in streams} == {total // (2 * shards) * 2}


def test_a_resumed_stream_starts_at_the_group_of_its_window():
    order = create_order(1, 0, [10] * 40)
    whole = list_examples(order.get_epoch(0, 0))
    stream = order.get_epoch(0, 200)
    # 200 examples are 28 windows of 7 and 4 more; window 28 begins at 196, in the third group.
    assert (stream.first_window, stream.window_skip) == (28, 4)
    assert stream.skips.tolist() == [36, 0, 0]
    assert np.array_equal(list_examples(stream), whole[160:])


@pytest.mark.parametrize("change", [{"epoch": 1}, {"index": 1}, {"shards": 4}])
def test_the_windows_depend_on_epoch_shard_and_shard_count(change):
    base = {"epoch": 0, "index": 0, "shards": 2}

    def get_seed(epoch: int, index: int, shards: int) -> int:
        return create_order(shards, index, [10] * 8).get_epoch(epoch, 0).seed

    assert get_seed(**base) == get_seed(**base) != get_seed(**(base | change))
