"""Order of examples: pure functions of (seed, epoch), in numpy alone.

Two orders. *Exact*: one permutation of the split per epoch, or as many draws by weights; the global
batches are the same for any number of shards. *Sharded*: units (files) are permuted and split into
equal ranges; each shard reads its own in file order and shuffles within windows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

# Units that a shard reads side by side; a resume re-reads at most this many.
GROUP_UNITS = 8
_WORD = 0xFFFFFFFF
_SALT_EXAMPLES, _SALT_UNITS, _SALT_WINDOWS = 0x6F726465, 0x756E6974, 0x77696E64
_SALT_DRAWS = 0x64726177


def get_permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return [count] int64: the epoch's order of all examples.

    Uses numpy's legacy generator, whose stream is frozen for all later versions.
    """
    return _create_rng(_SALT_EXAMPLES, seed, epoch).permutation(count).astype(np.int64)


@dataclass(frozen=True)
class ShardSpec:
    """This input process among all of them, and their common batch."""

    index: int
    count: int
    global_batch_size: int
    repeats: int = 1  # copies of an example in the exact order of an epoch

    @property
    def rank_batch_size(self) -> int:
        """Number of examples of a global batch that this shard delivers."""
        return self.global_batch_size // self.count

    def take_blocks(self, indices: np.ndarray) -> np.ndarray:
        """Return this shard's contiguous block of each whole global batch in `indices`."""
        blocks = indices.reshape(-1, self.count, self.rank_batch_size)
        return blocks[:, self.index].reshape(-1)


def get_exact_epoch(
    num_examples: int, spec: ShardSpec, seed: int, epoch: int, start: int
) -> np.ndarray:
    """Return [n] int64: this shard's examples of the epoch after `start` global examples.

    The permutation's incomplete last global batch is dropped.
    """
    return get_exact_copies(num_examples, spec, seed, epoch, start)[0]


def get_exact_copies(
    num_examples: int, spec: ShardSpec, seed: int, epoch: int, start: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return [n], [n] int64: the examples of `get_exact_epoch`, and which copy each of them is.

    Each example of the permutation occurs `repeats` times in a sequence of the usual length.
    Within a global batch all first copies come before all second ones: neighbours, which are
    mixed and compared, are different examples, and shards get different copies.
    """
    order = get_permutation(num_examples, seed, epoch)
    places, copies = _get_places(num_examples, spec, start)
    return order[places], copies


def _get_places(total: int, spec: ShardSpec, start: int) -> tuple[np.ndarray, np.ndarray]:
    """Return [n], [n] int64: this shard's places in an epoch's order, and the copy there."""
    batches = max(0, total - start) // spec.global_batch_size
    positions = np.arange(start, start + batches * spec.global_batch_size, dtype=np.int64)
    by_copy = positions.reshape(batches, spec.global_batch_size)
    ranks = np.argsort(by_copy % spec.repeats, axis=1, kind="stable")
    positions = spec.take_blocks(np.take_along_axis(by_copy, ranks, axis=1).reshape(-1))
    return positions // spec.repeats, positions % spec.repeats


@dataclass(frozen=True, eq=False)
class Sampling:
    """Draws of examples by weights, as many in an epoch as there are examples.

    Systematic sampling: examples are laid in a random order, each as long as it is expected, and
    every whole number from a random start on draws the one that it lies in. So an example expected
    2.3 times comes 2 or 3 times, and one expected 0.3 times never twice.
    """

    weights: np.ndarray  # [num_examples] float64, at least 0 and some above it

    @cached_property
    def expected(self) -> np.ndarray:
        """[num_examples] float64: mean number of an example's draws in an epoch."""
        return self.weights * (len(self.weights) / self.weights.sum())

    @cached_property
    def most(self) -> int:
        """A number that no example's draws in an epoch exceed."""
        return int(self.expected.max()) + 2

    @lru_cache(maxsize=2)  # noqa: B019 (the readers of a mixture share the draws of an epoch)
    def draw(self, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return [num_examples], twice: the epoch's examples, and which draw of theirs it is."""
        rng, count = _create_rng(_SALT_DRAWS, seed, epoch), len(self.weights)
        order = rng.permutation(np.flatnonzero(self.weights))
        ends = np.cumsum(self.expected[order])
        chosen = np.searchsorted(ends, rng.random_sample() + np.arange(count), side="right")
        chosen = np.minimum(chosen, len(order) - 1)  # the last end may be rounded down
        draws = np.arange(count) - np.searchsorted(chosen, chosen, side="left")
        shuffled = rng.permutation(count)
        return order[chosen][shuffled].astype(np.int64), draws[shuffled].astype(np.int64)


@dataclass(frozen=True, eq=False)
class ExactOrder:
    """The exact order of one shard: each example once in an epoch, or drawn by weights."""

    num_examples: int
    spec: ShardSpec
    seed: int
    sampling: Sampling | None = None
    # Number of the first example among those that are drawn, of which others are left out
    first: int | None = None

    @property
    def batch_size(self) -> int:
        """Number of examples that are read together: a member's mean share of a batch."""
        size = self.spec.rank_batch_size
        if self.first is None or self.sampling is None:
            return size
        own = self.sampling.weights[self.first : self.first + self.num_examples]
        return max(1, round(size * float(own.sum() / self.sampling.weights.sum())))

    def get_epoch(self, epoch: int, start: int) -> tuple[np.ndarray, np.ndarray]:
        """Return [n], [n] int64: the epoch's examples after `start` global ones, and their epochs.

        Their epochs are those that their augmentation is drawn for: several copies of an example in
        an epoch are augmented as in epochs of their own.
        """
        spec, repeats = self.spec, self.spec.repeats
        if self.sampling is None:
            order, copies = get_exact_copies(self.num_examples, spec, self.seed, epoch, start)
            return order, epoch * repeats + copies
        drawn, draws = self.sampling.draw(self.seed, epoch)
        places, copies = _get_places(len(drawn), spec, start)
        examples = drawn[places] - (self.first or 0)
        epochs = (epoch * self.sampling.most + draws[places]) * repeats + copies
        own = (examples >= 0) & (examples < self.num_examples)
        return examples[own], epochs[own]


def get_evaluation_blocks(num_examples: int, spec: ShardSpec) -> np.ndarray:
    """Return [n] int64: this shard's examples of one ordered pass; its last batch may be short."""
    batches = -(-num_examples // spec.global_batch_size)
    order = np.full(batches * spec.global_batch_size, -1, np.int64)
    order[:num_examples] = np.arange(num_examples)
    order = spec.take_blocks(order)
    return order[order >= 0]


def get_evaluation_range(num_examples: int, spec: ShardSpec) -> tuple[int, int]:
    """Return [start, stop) of one ordered pass in which each shard reads a range of its own."""
    return (spec.index * num_examples // spec.count, (spec.index + 1) * num_examples // spec.count)


@dataclass(frozen=True)
class EpochStream:
    """One shard's examples of an epoch in the sharded order, from a position on."""

    # [n, GROUP_UNITS, 3] int64: unit, index of its first example here, examples here; the units of
    # a group are read side by side, groups one after another
    groups: np.ndarray
    skips: np.ndarray  # [n] int64: examples to skip at the start of each group
    first_window: int  # number of the window that the stream starts with
    window_skip: int  # examples of that window, after its shuffle, that were consumed before
    limit: int  # number of examples of the epoch to deliver, counted from its start
    seed: int  # of the windows' shuffles


@dataclass(frozen=True)
class ShardedOrder:
    """The sharded order of one shard."""

    # unit_starts, unit_counts: [U] int64: range of example indices of each unit
    unit_starts: np.ndarray
    unit_counts: np.ndarray
    window: int  # examples that are shuffled together
    spec: ShardSpec
    seed: int

    def get_epoch(self, epoch: int, start: int) -> EpochStream:
        """Return the stream of an epoch after `start` global examples, without earlier windows."""
        total = int(self.unit_counts.sum())
        consumed = start // self.spec.count
        batches = max(0, total - start) // self.spec.global_batch_size
        limit = consumed + batches * self.spec.rank_batch_size
        first_window = consumed // self.window
        pieces = self._get_pieces(epoch, total)
        groups, skips = _group(pieces, first_window * self.window)
        key = (self.seed, epoch, self.spec.index, self.spec.count)
        window_seed = int(_create_rng(_SALT_WINDOWS, *key).randint(0, 2**31 - 1))
        skip = consumed - first_window * self.window
        return EpochStream(groups, skips, first_window, skip, limit, window_seed)

    def _get_pieces(self, epoch: int, total: int) -> np.ndarray:
        """Return [n, 3] int64: this shard's equal part of the epoch's sequence of units."""
        share = total // self.spec.count
        begin, end = self.spec.index * share, (self.spec.index + 1) * share
        units = _create_rng(_SALT_UNITS, self.seed, epoch).permutation(len(self.unit_counts))
        counts = self.unit_counts[units]
        offsets = np.cumsum(counts) - counts
        low = np.clip(begin - offsets, 0, counts)
        high = np.clip(end - offsets, 0, counts)
        pieces = np.stack([units, self.unit_starts[units] + low, high - low], axis=1)
        return pieces[high > low].astype(np.int64)


def _group(pieces: np.ndarray, passed: int) -> tuple[np.ndarray, np.ndarray]:
    """Group pieces by GROUP_UNITS, from the group that holds example `passed` on."""
    padding = -len(pieces) % GROUP_UNITS
    groups = np.concatenate([pieces, np.zeros((padding, 3), np.int64)])
    groups = groups.reshape(-1, GROUP_UNITS, 3)
    ends = np.cumsum(groups[:, :, 2].sum(axis=1))
    first = int(np.searchsorted(ends, passed, side="right"))
    skips = np.zeros(len(groups), np.int64)
    if first < len(groups):
        skips[first] = passed - (ends[first - 1] if first else 0)
    return groups[first:], skips[first:]


def _create_rng(*key: int) -> np.random.RandomState:
    """Create a generator that depends on all 64 bits of every number of the key."""
    words = [word for number in key for word in (number & _WORD, number >> 32 & _WORD)]
    return np.random.RandomState(np.array(words, np.uint32))
