"""Windows of tokens from any source: their facts for tasks, and their reader."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from big_vision.input.batches import TokenBatch
from big_vision.input.selection import Selection
from big_vision.input.source import ExactReader, Reading


@dataclass(frozen=True)
class TokenFacts:
    """Facts of every batch that a language model needs."""

    examples: ClassVar[str] = "tokens"
    sources: ClassVar[str] = "tokens or sequences"

    vocab_size: int  # tokens are 0 to vocab_size - 1
    sequence_length: int  # inputs of a window, which holds one token more
    floor: float | None = None  # lowest possible nats a token, if known
    ceiling: float | None = None  # nats a token of the best model that ignores all tokens, if known
    tokenizer: str = ""  # identifies the meaning of tokens; empty if unknown
    token_bytes: tuple[int, ...] = ()  # bytes of text of each token; empty if they are not text
    # Positions of a window whose targets are learnt and evaluated; empty: all
    judged: tuple[int, ...] = ()


class WindowReader(ExactReader):
    """Reads windows by their index in the exact order; a subclass implements `load_windows`."""

    facts: TokenFacts

    def __init__(self, selection: Selection, facts: TokenFacts, reading: Reading) -> None:
        super().__init__(selection.num_examples, facts, reading)

    @abstractmethod
    def load_windows(self, indices: np.ndarray) -> np.ndarray:
        """Return [n, T + 1] integers: the tokens of windows."""

    def read_examples(self, indices: np.ndarray, epoch: int) -> TokenBatch:
        """Return one batch of the given windows, which are the same in every epoch."""
        tokens = torch.from_numpy(self.load_windows(indices).astype(np.int32))
        index = torch.from_numpy(np.asarray(indices, np.int64))
        return TokenBatch(mask=index >= 0, indices=index, tokens=tokens)

    def create_blank(self, size: int) -> TokenBatch:
        index = torch.full((size,), -1, dtype=torch.int64)
        tokens = torch.zeros((size, self.facts.sequence_length + 1), dtype=torch.int32)
        return TokenBatch(mask=index >= 0, indices=index, tokens=tokens)
