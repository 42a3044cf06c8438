"""What a fused kernel knows of one chunk of a group of heads whose decays are of channels.

Such a decay stands inside the products of keys. Rows and columns decay towards the boundary of two
halves of a chunk (`channel_decays.py`), and one product of each width of halves has all its pairs:
below the diagonal queries with keys before them, above it keys with the erased ones behind them.
Attributes and methods are those of `HeadChunk`. Written against jax 0.7.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from models.delta.kernels.channel_decays import decay_halves, list_widths, mix
from models.delta.kernels.head_tiles import ROWS, cut_keys, cut_values, find_depth
from models.delta.kernels.split_products import list_places, multiply, split

if TYPE_CHECKING:
    from models.delta.kernels.forward import FusedPlan


@dataclass(frozen=True)
class ChannelHead:
    """One head's rows [C, K] of float32.

    Attributes:
      erased: erase * keys.
      levels: decays of rows towards the boundary of two halves, of each width.
      into: decays since the chunk began; `out` up to its end.
    """

    queries: Any
    keys: Any
    erased: Any
    levels: list[Any]
    into: Any
    out: Any

    @cached_property
    def widths(self) -> list[int]:
        """Of halves."""
        return list_widths(self.keys.shape[0])

    def face(self, level: int, seconds: Any) -> Any:
        """Keys of first halves and such rows of second ones, decayed."""
        return mix(self.keys, seconds, self.widths[level]) * self.levels[level]


class ChannelChunk:
    """Of a group of heads.

    Attributes:
      is_wide: values are float32.
      depth: parts of a float32 factor.
      heads: `ChannelHead` of each.
    """

    def __init__(self, plan: FusedPlan, given: Sequence[Any], moving: Any = None) -> None:
        q, k, self._values, g, *self._rates = given
        self.plan, self.size = plan, k.shape[1]
        self.is_wide, self.depth = find_depth(self._values)
        self.place, self.other = list_places(self.size)
        self._columns = self._rates[0][0, 0, 0].T if plan.rows else None
        self.heads = [self._find_head(h, q, k, g) for h in range(plan.group)]
        if moving is not None:
            self._pairs = [self._pair(one) for one in self.heads]
            self._seen = [self._read(one, moving[h]) for h, one in enumerate(self.heads)]

    def get_erase(self, head: int) -> Any:
        """[C, 1 or K]."""
        return self._get_rate(0, head)

    def get_write(self, head: int) -> Any:
        """[C, 1 or V]."""
        return self._get_rate(1, head)

    def get_values(self, head: int) -> Any:
        """Float32 [C, V]."""
        return cut_values(self.plan, self._values, head)

    def get_system(self, head: int) -> Any:
        """L, strictly lower."""
        from jax import numpy as jnp

        return jnp.where(self.place < self.other, self._pairs[head], 0.0).T

    def get_sides(self, head: int) -> Any:
        """write v - (e^c erase K) S."""
        return self.get_write(head) * self.get_values(head) - self._seen[head][: self.size]

    def get_pairs(self, head: int) -> tuple[Any, Any]:
        """P, and what queries see of the state before the chunk."""
        from jax import numpy as jnp

        pairs = jnp.where(self.place >= self.other, self._pairs[head], 0.0)
        return pairs, self._seen[head][self.size :]

    def write(self, head: int, moved: Any) -> Any:
        """What V' leaves in the state behind the chunk."""
        one = self.heads[head]
        keys = split(one.keys * one.out, self.depth)
        return multiply(keys, split(moved, self.depth), self.depth, left=0)

    def decay(self, head: int, state: Any) -> Any:
        """A state over the whole chunk."""
        from jax import numpy as jnp

        last = self.heads[head].into[self.size - 1 :]
        return jnp.broadcast_to(last, state.shape[::-1]).T * state

    def join(self, head: ChannelHead, level: int, product: Any, found: Any) -> Any:
        """What is found of wider halves, and of those of a level their product."""
        from jax import numpy as jnp

        return jnp.where(self.place ^ self.other < 2 * head.widths[level], product, found)

    def fill_diagonal(self, rows: Any, others: Any, found: Any) -> Any:
        """Products of rows with those of the same token."""
        from jax import numpy as jnp

        same = jnp.sum(rows * others, axis=1, keepdims=True)
        return jnp.where(self.place == self.other, same, found)

    def _get_rate(self, kind: int, head: int) -> Any:
        if self._columns is None:
            width = self.plan.widths[kind]
            return self._rates[kind][0, :, head * width : (head + 1) * width]
        place = kind * ROWS + head
        return self._columns[:, place : place + 1]

    def _pair(self, head: ChannelHead) -> Any:
        """P, and above the diagonal L turned."""
        found: Any = 0.0
        for level in reversed(range(len(head.widths))):
            rows, columns = (
                split(head.face(level, x), self.depth) for x in (head.queries, head.erased)
            )
            product = multiply(rows, columns, self.depth, right=1)
            found = self.join(head, level, product, found)
        return self.fill_diagonal(head.queries, head.keys, found)

    def _read(self, head: ChannelHead, state: Any) -> Any:
        """Erased keys and queries [2 C] times the state before the chunk."""
        from jax import numpy as jnp

        both = jnp.concatenate([head.erased * head.into, head.queries * head.into])
        return multiply(split(both, self.depth), split(state, self.depth), self.depth)

    def _find_head(self, head: int, q: Any, k: Any, g: Any) -> ChannelHead:
        from jax import numpy as jnp

        width = self.plan.widths[0]
        queries, keys = (cut_keys(self.plan, x, head).astype(jnp.float32) for x in (q, k))
        levels, into, out = decay_halves(g[0, :, head * width : (head + 1) * width])
        return ChannelHead(queries, keys, self.get_erase(head) * keys, levels, into, out)
