"""Made-up sequences whose lowest loss is known: `data.name` says which, as `copy,symbols=8`.

A window is a function of its split and its index alone. The floor is the entropy of a window's T
targets divided by T: no model goes below it on windows that it has not seen.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from big_vision.input.selection import Selection
from big_vision.input.source import Reading, Role, Source
from big_vision.input.windows import TokenFacts, WindowReader
from utils.errors import UserError, get_hint

_TERM = re.compile(r"^(\w+)=(\d+)$")
_SPLITS = {"train": 1, "validation": 2, "test": 3}


@dataclass(frozen=True)
class SequenceShape:
    """What is made up; data.name holds it as `copy,symbols=8,num_examples=20000`.

    Attributes:
      kind: a name in `SEQUENCES`.
      symbols: different ones that are drawn.
      num_examples: windows of the training split.
      num_held_out: windows of every other split.
    """

    kind: str
    symbols: int = 8
    num_examples: int = 20_000
    num_held_out: int = 1_000


@dataclass(frozen=True)
class SequenceKind:
    """One kind of sequence.

    Attributes:
      length_rule: what T must be a multiple of, and at least.
      count_tokens: shape -> size of the vocabulary.
      make: (uniform [n, T + 1] in [0, 1), shape) -> tokens [n, T + 1].
      get_bounds: (T, shape) -> nats a token: floor, and ceiling without a look at any token.
    """

    length_rule: int
    count_tokens: Callable[[SequenceShape], int]
    make: Callable[[np.ndarray, SequenceShape], np.ndarray]
    get_bounds: Callable[[int, SequenceShape], tuple[float, float]]


def parse_sequence_name(name: str) -> SequenceShape:
    """The sequences that data.name describes.

    Raises:
      UserError: no such kind, or a term that does not describe it.
    """
    kind, *terms = (part.strip() for part in name.split(","))
    if kind not in SEQUENCES:
        raise UserError(
            f"data.name ({name!r}) names no sequence; {get_hint(kind, SEQUENCES)}, as in "
            "copy,symbols=8,num_examples=20000"
        )
    shape = SequenceShape(kind)
    for term in terms:
        match = _TERM.match(term)
        if match is None or match[1] == "kind" or not hasattr(shape, match[1]) or match[2] == "0":
            raise UserError(
                f"data.name ({name}): {term!r} does not describe a sequence; write for example "
                "copy,symbols=8,num_examples=20000,num_held_out=1000"
            )
        shape = replace(shape, **{match[1]: int(match[2])})
    return shape


def draw_uniform(split: int, indices: np.ndarray, count: int) -> np.ndarray:
    """[n, count] float64 in [0, 1): a function of split, index and place (SplitMix64)."""
    with np.errstate(over="ignore"):
        place = np.arange(count, dtype=np.uint64)
        value = indices.astype(np.uint64)[:, None] * np.uint64(0x9E3779B97F4A7C15)
        value = _mix_bits(value + np.uint64(split) * np.uint64(0xD1342543DE82EF95))
        value = _mix_bits(value + (place + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    return (value >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix_bits(value: np.ndarray) -> np.ndarray:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _make_copy(uniform: np.ndarray, shape: SequenceShape) -> np.ndarray:
    half = uniform.shape[1] // 2
    first = (uniform[:, :half] * shape.symbols).astype(np.int64)
    bar = np.full((len(first), 1), shape.symbols)
    return np.concatenate([first, bar, first], axis=1)


def _bound_copy(length: int, shape: SequenceShape) -> tuple[float, float]:
    """The first symbol is given, the second half follows from the first."""
    drawn = length // 2 - 1
    log = math.log(shape.symbols)
    return drawn * log / length, (drawn + length // 2) * log / length


SEQUENCES: dict[str, SequenceKind] = {
    "copy": SequenceKind(2, lambda shape: shape.symbols + 1, _make_copy, _bound_copy),
}


@dataclass(frozen=True, kw_only=True)
class SequenceSelection(Selection):
    """Windows of a split.

    Attributes:
      split: number of the split, which the windows are drawn by.
    """

    shape: SequenceShape
    split: int


class SequenceSource(Source):
    """Sequences out of nothing, described by data.name and data.sequence_length."""

    shaped_by_name = True
    is_made_up = True

    @property
    def title(self) -> str:
        """The kind of sequence."""
        return f"sequences {self.data.name}"

    def select(self, role: Role) -> SequenceSelection:
        """The windows of `train`, `validation` or `test`, which have none in common."""
        shape = parse_sequence_name(self.data.name)
        key = {"train": "train_split", "eval": "eval_split", "test": "test_split"}[role]
        split = getattr(self.data, key)
        if split not in _SPLITS:
            raise UserError(
                f"data.{key} ({split!r}) is no split of made-up sequences; "
                f"{get_hint(split, _SPLITS)}"
            )
        count = shape.num_examples if split == "train" else shape.num_held_out
        return SequenceSelection(num_examples=count, shape=shape, split=_SPLITS[split])

    def describe(self, selection: SequenceSelection, role: Role) -> TokenFacts:
        """Vocabulary, length and the known bounds of the loss."""
        kind, length = SEQUENCES[selection.shape.kind], self.data.sequence_length
        if length % kind.length_rule:
            raise UserError(
                f"data.sequence_length ({length}) does not suit {selection.shape.kind}; make it a "
                f"multiple of {kind.length_rule}"
            )
        floor, ceiling = kind.get_bounds(length, selection.shape)
        return TokenFacts(kind.count_tokens(selection.shape), length, floor, ceiling)

    def open(self, selection: SequenceSelection, reading: Reading) -> SequenceReader:
        """A reader that makes windows from their index."""
        return SequenceReader(selection, self.describe(selection, reading.role), reading)


class SequenceReader(WindowReader):
    """Makes the windows of a split."""

    def __init__(self, selection: SequenceSelection, facts: TokenFacts, reading: Reading) -> None:
        super().__init__(selection, facts, reading)
        self._selection = selection

    def load_windows(self, indices: np.ndarray) -> np.ndarray:
        """[n, T + 1] int64."""
        shape = self._selection.shape
        uniform = draw_uniform(self._selection.split, indices, self.facts.sequence_length + 1)
        return SEQUENCES[shape.kind].make(uniform, shape)

    def get_ids(self, indices: np.ndarray) -> tuple[str, ...]:
        """`copy__42`."""
        return tuple(f"{self._selection.shape.kind}__{index}" for index in indices)

    def describe(self, index: int) -> str:
        """The window's name, for messages."""
        return f"window {index} of {self._selection.shape.kind}"
