"""Windows of tokens, whatever they come from: what a task must know of them, and their reader."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from big_vision.input.batches import TokenBatch
from big_vision.input.order import get_evaluation_blocks, get_exact_epoch
from big_vision.input.selection import Selection
from big_vision.input.source import Reader, Reading
from utils.errors import UserError


@dataclass(frozen=True)
class TokenFacts:
    """What a language model must know of every batch.

    Attributes:
      vocab_size: tokens are 0 to vocab_size - 1.
      sequence_length: inputs of a window, which holds one token more.
      floor: nats a token that no model can go below, where that is known.
      ceiling: nats a token of the best model that looks at no token, where that is known.
      tokenizer: what tells tokens of one meaning from others; empty: nothing does.
      token_bytes: bytes of text that each token stands for; empty: it is no text.
      judged: places of a window whose targets are learnt and judged; empty: all.
    """

    vocab_size: int
    sequence_length: int
    floor: float | None = None
    ceiling: float | None = None
    tokenizer: str = ""
    token_bytes: tuple[int, ...] = ()
    judged: tuple[int, ...] = ()


def require_tokens(facts: object, source: str) -> TokenFacts:
    """The facts of a source of tokens.

    Raises:
      UserError: the source gives something else.
    """
    if not isinstance(facts, TokenFacts):
        raise UserError(
            f"data.source ({source}) gives no tokens, which a language model reads; choose "
            "tokens or sequences"
        )
    return facts


class WindowReader(Reader):
    """Reads windows by their index in the exact order; a subclass makes them.

    Args:
      facts: of every window.
    """

    def __init__(self, selection: Selection, facts: TokenFacts, reading: Reading) -> None:
        self.num_examples, self.facts = selection.num_examples, facts
        self._shard, self._seed = reading.shard, reading.seed

    @abstractmethod
    def load_windows(self, indices: np.ndarray) -> np.ndarray:
        """[n, T + 1] integers: the tokens of windows."""

    def read_training(self, epoch: int, start: int) -> Iterator[TokenBatch]:
        """Endless batches from `start` global windows into `epoch`."""
        while True:
            order = get_exact_epoch(self.num_examples, self._shard, self._seed, epoch, start)
            yield from self._cut(order, epoch)
            epoch, start = epoch + 1, 0

    def read_evaluation(self) -> Iterator[TokenBatch]:
        """One ordered pass over this shard's blocks; the last batch may be short."""
        yield from self._cut(get_evaluation_blocks(self.num_examples, self._shard), 0)

    def read_examples(self, indices: np.ndarray, epoch: int) -> TokenBatch:
        """One batch of the given windows; they are the same in every epoch."""
        tokens = torch.from_numpy(self.load_windows(indices).astype(np.int32))
        index = torch.from_numpy(np.asarray(indices, np.int64))
        return TokenBatch(mask=index >= 0, indices=index, tokens=tokens)

    def create_blank(self, size: int) -> TokenBatch:
        """Windows of token 0 that the mask leaves out."""
        index = torch.full((size,), -1, dtype=torch.int64)
        tokens = torch.zeros((size, self.facts.sequence_length + 1), dtype=torch.int32)
        return TokenBatch(mask=index >= 0, indices=index, tokens=tokens)

    def _cut(self, order: np.ndarray, epoch: int) -> Iterator[TokenBatch]:
        size = self._shard.rank_batch_size
        for begin in range(0, len(order), size):
            yield self.read_examples(order[begin : begin + size], epoch)
