"""Stateless random numbers: a function of (run seed, epoch, example index, op position)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from big_vision.tensorflow_setup import tf


class Randomness:
    """The random numbers that one op may use for one example.

    The 128-bit key of a draw is (epoch, index) plus a constant that is hashed from (run seed, op
    position, path). Addition wraps, so within one op every (epoch, index) has a key of its own,
    and the ops' constants are too far apart to collide; Philox turns neighbouring keys into
    independent streams. It costs one addition in the graph.
    """

    def __init__(
        self, seed: int, position: int, example: tf.Tensor, path: Sequence[int] = ()
    ) -> None:
        """Args: example: int64 [2] tensor (epoch, index)."""
        self.example = example
        self._origin = (seed, position, *path)

    @property
    def epoch(self) -> tf.Tensor:
        return self.example[0]

    def child(self, number: int) -> Randomness:
        """Return independent numbers for a part of the op: a layer, a step."""
        seed, position, *path = self._origin
        return Randomness(seed, position, self.example, (*path, number))

    def for_example(self, first: tf.Tensor, second: tf.Tensor) -> Randomness:
        """Return the op's numbers for another pair of scalar int64 in place of (epoch, index)."""
        seed, position, *path = self._origin
        return Randomness(seed, position, tf.stack([first, second]), tuple(path))

    def key(self) -> tf.Tensor:
        """Return the int64 [2] seed of a `tf.random.stateless_*` op; use it for one draw only."""
        return self.example + get_constant(self._origin)

    def uniform(
        self, shape: tf.Tensor | Sequence[int] = (), low: float = 0.0, high: float = 1.0
    ) -> tf.Tensor:
        """Draw float32 in [low, high); the one draw of this object."""
        return tf.random.stateless_uniform(shape, self.key(), low, high, alg="philox")

    def integers(self, limits: tf.Tensor) -> tf.Tensor:
        """Draw an int32 in [0, limit) for each element of `limits`, an int32 [n] tensor."""
        draws = tf.random.stateless_uniform(
            tf.shape(limits), self.key(), 0, tf.int32.max, tf.int32, alg="philox"
        )
        return draws % limits  # the bias is limit / 2^31: negligible for sides of images


def get_constant(words: tuple[int, ...]) -> tuple[int, int]:
    """Hash whole numbers to two int64 numbers, equal on every machine."""
    digest = hashlib.blake2b(repr(tuple(int(w) for w in words)).encode(), digest_size=16).digest()
    first = int.from_bytes(digest[:8], "little", signed=True)
    second = int.from_bytes(digest[8:], "little", signed=True)
    return first, second
