"""Synthetic sequences whose lowest loss is known: `data.name` describes them, as `copy,symbols=8`.

A window is a function of its split and its index alone. The floor is the entropy of a window's T
targets divided by T: no model is below it on windows that it has not seen.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from big_vision.input.selection import Selection
from big_vision.input.source import SPLIT_KEYS, Reading, Role, Source
from big_vision.input.text.windows import TokenFacts, WindowReader
from utils.errors import UserError, get_hint

_TERM = re.compile(r"^(\w+)=(\d+)$")
_TERMS_OF_KINDS = {"keys": ("recall", "rewrite"), "rounds": ("copy", "reverse")}
_SPLITS = {"train": 1, "validation": 2, "test": 3}


@dataclass(frozen=True)
class SequenceShape:
    """Sizes of synthetic sequences, as in data.name: `copy,symbols=8,num_examples=20000`."""

    kind: str  # a name in `SEQUENCES`
    # Number of different ones: numbers of counting, values of recall and rewrite, kinds of bracket
    # of dyck
    symbols: int = 8
    strides: int = 4  # of counting: from 1 to this
    depth: int = 8  # of dyck: largest number of open brackets
    # of recall and rewrite: number of different keys, of which each window has some; 0: as many as
    # it has pairs
    keys: int = 0
    rounds: int = 1  # of copy and reverse: number of rounds in a window
    # 1: only answers are evaluated: the repeated part of copies and reverse and the values after
    # the queries of recall and rewrite
    answers: int = 0
    num_examples: int = 20_000  # windows of the training split
    num_held_out: int = 1_000  # windows of every other split


@dataclass(frozen=True)
class SequenceKind:
    """One kind of sequence."""

    length_rule: int  # T must be a multiple of it, and at least twice as large
    count_tokens: Callable[[int, SequenceShape], int]  # (T, shape) -> size of the vocabulary
    # (uniform [n, T + 1] in [0, 1), shape) -> tokens [n, T + 1]
    make: Callable[[np.ndarray, SequenceShape], np.ndarray]
    # (T, shape) -> nats a token: floor, and ceiling of models that ignore all tokens
    get_bounds: Callable[[int, SequenceShape], tuple[float, float]]
    # (T, shape) -> positions of the targets that follow from the window; None if there are no
    # answers
    list_answers: Callable[[int, SequenceShape], Sequence[int]] | None = None


def parse_sequence_name(name: str) -> SequenceShape:
    """Parse data.name; UserError for an unknown kind, or a term that does not describe it."""
    kind, *terms = (part.strip() for part in name.split(","))
    if kind not in SEQUENCES:
        raise UserError(
            f"data.name ({name!r}) is not a sequence; {get_hint(kind, SEQUENCES)}, as in "
            "copy,symbols=8,num_examples=20000"
        )
    shape = SequenceShape(kind)
    sizes: dict[str, int] = {}
    for term in terms:
        match = _TERM.match(term)
        if match is None or match[1] == "kind" or not hasattr(shape, match[1]):
            raise UserError(
                f"data.name ({name}): {term!r} does not describe a sequence; write for example "
                "copy,symbols=8,num_examples=20000,num_held_out=1000"
            )
        if int(match[2]) == 0:
            raise UserError(
                f"data.name ({name}): {match[1]} (0) must be at least 1; raise it, or leave the "
                "term out"
            )
        if match[1] in sizes:
            raise UserError(f"data.name ({name}) has {match[1]} twice; remove one")
        sizes[match[1]] = int(match[2])
    shape = SequenceShape(kind, **sizes)
    _refuse_terms(shape, name)
    if shape.symbols < shape.strides and kind == "counting":
        raise UserError(
            f"data.name ({name}): strides ({shape.strides}) exceeds symbols ({shape.symbols}), "
            "modulo which it counts; lower it"
        )
    return shape


def _refuse_terms(shape: SequenceShape, name: str) -> None:
    """Raise a UserError for terms that do not apply to this kind."""
    if shape.answers > 1:
        raise UserError(f"data.name ({name}): answers must be 1 or left out; change it")
    asking = [kind for kind, sequence in SEQUENCES.items() if sequence.list_answers]
    if shape.answers and shape.kind not in asking:
        raise UserError(
            f"data.name ({name}): answers is not supported with {shape.kind}; leave it out, "
            f"or choose {', '.join(asking)}"
        )
    for term, kinds in _TERMS_OF_KINDS.items():
        is_given = getattr(shape, term) != getattr(SequenceShape, term)
        if is_given and shape.kind not in kinds:
            raise UserError(
                f"data.name ({name}): {term} are only for {' and '.join(kinds)}; leave the term out"
            )


def draw_uniform(split: int, indices: np.ndarray, count: int) -> np.ndarray:
    """Return [n, count] float64 in [0, 1), a function of split, index and position (SplitMix64)."""
    with np.errstate(over="ignore"):
        position = np.arange(count, dtype=np.uint64)
        value = indices.astype(np.uint64)[:, None] * np.uint64(0x9E3779B97F4A7C15)
        value = _mix_bits(value + np.uint64(split) * np.uint64(0xD1342543DE82EF95))
        value = _mix_bits(value + (position + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    return (value >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix_bits(value: np.ndarray) -> np.ndarray:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _make_copy(uniform: np.ndarray, shape: SequenceShape) -> np.ndarray:
    """Make symbols, a bar, the same symbols; a bar between rounds."""
    return _make_rounds(uniform, shape, slice(None))


def _make_reverse(uniform: np.ndarray, shape: SequenceShape) -> np.ndarray:
    """Make symbols, a bar, the symbols in reverse order; a bar between rounds."""
    return _make_rounds(uniform, shape, slice(None, None, -1))


def _make_rounds(uniform: np.ndarray, shape: SequenceShape, order: slice) -> np.ndarray:
    """Make rounds of symbols and the same in another order, all parts but the last before a bar."""
    count = _count_round(uniform.shape[1] - 1, shape)
    first = (uniform[:, : shape.rounds * count] * shape.symbols).astype(np.int64)
    first = first.reshape(len(first), shape.rounds, count)
    bar = np.full((*first.shape[:2], 1), shape.symbols)
    rows = np.concatenate([first, bar, first[:, :, order], bar], axis=2)
    return rows.reshape(len(rows), -1)[:, :-1]


def _count_round(length: int, shape: SequenceShape) -> int:
    """Return the number of symbols of a round."""
    return (length + 2) // (2 * shape.rounds) - 1


def _make_selective_copy(uniform: np.ndarray, shape: SequenceShape) -> np.ndarray:
    """Make symbols in order at random positions, blanks between them, a bar, the symbols alone.

    The blank follows the symbols in the vocabulary, then the bar.

    Source: Gu and Dao 2023, arXiv:2312.00752, section 4.1.1.
    """
    count = uniform.shape[1] // 4
    places = np.argsort(uniform[:, : 3 * count], axis=1, kind="stable")[:, :count]
    symbols = (uniform[:, 3 * count : 4 * count] * shape.symbols).astype(np.int64)
    spread = np.full((len(uniform), 3 * count), shape.symbols)
    np.put_along_axis(spread, np.sort(places, axis=1), symbols, axis=1)
    bar = np.full((len(uniform), 1), shape.symbols + 1)
    return np.concatenate([spread, bar, symbols], axis=1)


def _list_last_quarter(length: int, _shape: SequenceShape) -> range:
    """List the targets after the bar."""
    return range(length - length // 4, length)


def _bound_selective_copy(length: int, shape: SequenceShape) -> tuple[float, float]:
    """Compute bounds: positions and symbols are random, the first token is given.

    A third of the tokens are no blanks.
    """
    count, log = length // 4, math.log(shape.symbols)
    first = _compute_entropy(np.array([1 / 3, 2 / 3])) + log / 3
    floor = math.log(math.comb(3 * count, count)) + count * log - first
    return floor / length, ((3 * count - 1) * first + count * log) / length


def _list_rounds(length: int, shape: SequenceShape) -> tuple[int, ...]:
    """List the targets after the first bar of each round, without the bar between two."""
    count = _count_round(length, shape)
    starts = range(count, length, 2 * count + 2)
    return tuple(position for start in starts for position in range(start, start + count))


def _bound_copy(length: int, shape: SequenceShape) -> tuple[float, float]:
    """Compute bounds: the first symbol is given, the repeated part follows from the first part."""
    drawn, log = shape.rounds * _count_round(length, shape), math.log(shape.symbols)
    return (drawn - 1) * log / length, (2 * drawn - 1) * log / length


def _make_counting(uniform: np.ndarray, shape: SequenceShape) -> np.ndarray:
    """Make numbers modulo `symbols` that increase by a stride of 1 to `strides`."""
    start, stride = (uniform[:, :2] * (shape.symbols, shape.strides)).astype(np.int64).T
    steps = np.arange(uniform.shape[1])
    return (start[:, None] + (stride[:, None] + 1) * steps) % shape.symbols


def _bound_counting(length: int, shape: SequenceShape) -> tuple[float, float]:
    """Compute bounds: the first step determines the stride, and with it all that follows."""
    return math.log(shape.strides) / length, math.log(shape.symbols)


def _make_recall(uniform: np.ndarray, shape: SequenceShape) -> np.ndarray:
    """Make pairs of different keys and a value each, a bar, then random keys with their values.

    Keys come first in the vocabulary, then values, then the bar.
    """
    pairs = uniform.shape[1] // 4
    count = shape.keys or pairs
    return _query_keys(uniform, _draw_keys(uniform[:, :pairs], count), count, shape.symbols)


def _make_rewrite(uniform: np.ndarray, shape: SequenceShape) -> np.ndarray:
    """Make windows as of recall, but any key may repeat: its value is then the last one.

    Source: Schlag et al. 2021, arXiv:2102.11174, section 6.1 (sampling with replacement).
    """
    pairs = uniform.shape[1] // 4
    count = shape.keys or pairs
    keys = (uniform[:, :pairs] * count).astype(np.int64)
    return _query_keys(uniform, keys, count, shape.symbols)


def _query_keys(uniform: np.ndarray, keys: np.ndarray, count: int, symbols: int) -> np.ndarray:
    """Make windows of keys [n, m], of which `count` are different, and their last values."""
    pairs = keys.shape[1]
    values = count + (uniform[:, pairs : 2 * pairs] * symbols).astype(np.int64)
    queried = (uniform[:, 2 * pairs : 3 * pairs] * pairs).astype(np.int64)
    queries = np.take_along_axis(keys, queried, axis=1)
    rows, known = np.arange(len(keys)), np.zeros((len(keys), count), np.int64)
    for pair in range(pairs):
        known[rows, keys[:, pair]] = values[:, pair]
    answers = np.take_along_axis(known, queries, axis=1)
    bar = np.full((len(keys), 1), count + symbols)
    written, asked = (
        np.stack(columns, axis=2).reshape(len(keys), -1)
        for columns in ((keys, values), (queries, answers))
    )
    return np.concatenate([written, bar, asked], axis=1)


def _draw_keys(uniform: np.ndarray, count: int) -> np.ndarray:
    """Draw different ones of `count` keys [n, m], in any order: a permutation if m is `count`."""
    pairs = uniform.shape[1]
    if count == pairs:
        return np.argsort(uniform, axis=1, kind="stable")
    keys = np.tile(np.arange(count), (len(uniform), 1))
    rows = np.arange(len(uniform))
    for position in range(pairs):  # Fisher and Yates
        other = position + (uniform[:, position] * (count - position)).astype(np.int64)
        keys[rows, position], keys[rows, other] = keys[rows, other], keys[rows, position].copy()
    return keys[:, :pairs]


def _count_keys_and_values(length: int, shape: SequenceShape) -> int:
    """Return the size of a vocabulary of keys, values and the bar."""
    return (shape.keys or length // 4) + shape.symbols + 1


def _list_answers(length: int, _shape: SequenceShape) -> range:
    """List the values after the queried keys."""
    return range(length // 2 + 1, length, 2)


def _bound_recall(length: int, shape: SequenceShape) -> tuple[float, float]:
    """Compute bounds: keys differ, and the first one is given; answers follow from the pairs."""
    pairs = length // 4
    count = shape.keys or pairs
    values = pairs * math.log(shape.symbols)
    drawn = math.lgamma(count) - math.lgamma(count - pairs + 1)
    floor = drawn + values + pairs * math.log(pairs)
    return floor / length, ((2 * pairs - 1) * math.log(count) + 2 * values) / length


def _bound_rewrite(length: int, shape: SequenceShape) -> tuple[float, float]:
    """Compute bounds: a key written n of m times is queried with probability n / m, n binomial."""
    pairs = length // 4
    count, values = shape.keys or pairs, pairs * math.log(shape.symbols)
    written = np.arange(1, pairs + 1)
    law = [math.comb(pairs, n) * (count - 1) ** (pairs - n) / count**pairs for n in written]
    queried = math.log(pairs) - count / pairs * float(np.dot(law, written * np.log(written)))
    floor = (pairs - 1) * math.log(count) + values + pairs * queried
    return floor / length, ((2 * pairs - 1) * math.log(count) + 2 * values) / length


def _make_dyck(uniform: np.ndarray, shape: SequenceShape) -> np.ndarray:
    """Make brackets of `symbols` kinds, opened before closed, at most `depth` of them open.

    With none open one opens, with `depth` open the last one closes, otherwise either with
    probability one half.
    """
    tokens = np.empty(uniform.shape, np.int64)
    rows = np.arange(len(uniform))
    stack = np.zeros((len(uniform), shape.depth + 1), np.int64)
    depth = np.zeros(len(uniform), np.int64)
    for position in range(uniform.shape[1]):
        drawn = np.where(depth == 0, uniform[:, position], 2 * uniform[:, position])
        opens = (drawn < 1) & (depth < shape.depth)
        kind = (np.minimum(drawn, 1 - 1e-9) * shape.symbols).astype(np.int64)
        closed = shape.symbols + stack[rows, np.maximum(depth - 1, 0)]
        tokens[:, position] = np.where(opens, kind, closed)
        stack[rows[opens], depth[opens]] = kind[opens]
        depth += np.where(opens, 1, -1)
    return tokens


def _bound_dyck(length: int, shape: SequenceShape) -> tuple[float, float]:
    """Compute bounds: the number of open brackets is a Markov chain, whose entropies add up."""
    kinds, law = math.log(shape.symbols), np.zeros(shape.depth + 1)
    law[1] = 1.0  # after the first bracket, which is given
    floor = ceiling = 0.0
    for _ in range(length):
        between = law[1:-1].sum()
        opening = law[0] + between / 2
        floor += law[0] * kinds + between * (math.log(2) + kinds / 2)
        ceiling += _compute_entropy(np.array([opening, 1 - opening])) + kinds
        up = np.concatenate([law[:1], law[1:-1] / 2, [0.0]])
        law = np.concatenate([[0.0], up[:-1]]) + np.concatenate([(law - up)[1:], [0.0]])
    return float(floor) / length, float(ceiling) / length


def _make_noise(uniform: np.ndarray, shape: SequenceShape) -> np.ndarray:
    """Make independent symbols, the i-th with a probability in proportion to 1 / i."""
    borders = np.cumsum(_get_noise_law(shape))[:-1]
    return np.searchsorted(borders, uniform, side="right")


def _bound_noise(length: int, shape: SequenceShape) -> tuple[float, float]:
    """Compute bounds: only the frequencies of the symbols can be learnt."""
    entropy = _compute_entropy(_get_noise_law(shape))
    return entropy, entropy


def _get_noise_law(shape: SequenceShape) -> np.ndarray:
    law = 1.0 / np.arange(1, shape.symbols + 1)
    return law / law.sum()


def _compute_entropy(law: np.ndarray) -> float:
    """Compute the entropy of a distribution in nats."""
    law = law[law > 0]
    return float(-(law * np.log(law)).sum())


SEQUENCES: dict[str, SequenceKind] = {
    "copy": SequenceKind(2, lambda length, s: s.symbols + 1, _make_copy, _bound_copy, _list_rounds),
    "reverse": SequenceKind(
        2, lambda length, s: s.symbols + 1, _make_reverse, _bound_copy, _list_rounds
    ),
    "selective_copy": SequenceKind(
        4,
        lambda length, s: s.symbols + 2,
        _make_selective_copy,
        _bound_selective_copy,
        _list_last_quarter,
    ),
    "counting": SequenceKind(1, lambda length, s: s.symbols, _make_counting, _bound_counting),
    "recall": SequenceKind(4, _count_keys_and_values, _make_recall, _bound_recall, _list_answers),
    "rewrite": SequenceKind(
        4, _count_keys_and_values, _make_rewrite, _bound_rewrite, _list_answers
    ),
    "dyck": SequenceKind(1, lambda length, s: 2 * s.symbols, _make_dyck, _bound_dyck),
    "noise": SequenceKind(1, lambda length, s: s.symbols, _make_noise, _bound_noise),
}


@dataclass(frozen=True, kw_only=True)
class SequenceSelection(Selection):
    """Windows of a split; the number of the split determines them."""

    shape: SequenceShape
    split: int

    def count_common(self, other: SequenceSelection) -> int:
        """Count windows of the same split and index; equal ones by chance are ignored."""
        is_same = (self.shape.kind, self.split) == (other.shape.kind, other.split)
        return min(self.num_examples, other.num_examples) if is_same else 0


class SequenceSource(Source[SequenceSelection]):
    """Synthetic sequences, described by data.name and data.sequence_length."""

    shaped_by_name = True
    is_synthetic = True

    @property
    def title(self) -> str:
        return f"sequences {self.data.name}"

    def select(self, role: Role) -> SequenceSelection:
        """Select the windows of `train`, `validation` or `test`, each split drawn separately.

        If windows are short and symbols few, splits have many in common by chance.
        """
        shape = parse_sequence_name(self.data.name)
        key = SPLIT_KEYS[role]
        split = getattr(self.data, key)
        if split not in _SPLITS:
            raise UserError(
                f"data.{key} ({split!r}) is not a split of sequences; {get_hint(split, _SPLITS)}"
            )
        count = shape.num_examples if split == "train" else shape.num_held_out
        return SequenceSelection(num_examples=count, shape=shape, split=_SPLITS[split])

    def describe(self, selection: SequenceSelection, role: Role) -> TokenFacts:
        kind, length = SEQUENCES[selection.shape.kind], self.data.sequence_length
        shape, rule = selection.shape, kind.length_rule
        if length % rule or length < 2 * rule:
            raise UserError(
                f"data.sequence_length ({length}) does not suit {shape.kind}; make it a multiple "
                f"of {rule}, {2 * rule} or more"
            )
        fits = (length + 2) % (2 * shape.rounds) == 0 and length + 2 >= 6 * shape.rounds
        if shape.rounds > 1 and not fits:
            raise UserError(
                f"data.sequence_length ({length}) does not suit {shape.rounds} rounds of "
                f"{shape.kind}; make it 2 less than a multiple of {2 * shape.rounds}, "
                f"{6 * shape.rounds - 2} or more"
            )
        if 0 < shape.keys < length // 4 and shape.kind == "recall":
            raise UserError(
                f"data.name ({self.data.name}): keys ({shape.keys}) are fewer than the "
                f"{length // 4} pairs of data.sequence_length ({length}); raise them, or choose "
                "rewrite, where a key may repeat"
            )
        vocabulary = kind.count_tokens(length, shape)
        if shape.answers and kind.list_answers:
            # They follow from the window, and all symbols are equally likely.
            judged, ceiling = tuple(kind.list_answers(length, shape)), math.log(shape.symbols)
            return TokenFacts(vocabulary, length, 0.0, ceiling, judged=judged)
        return TokenFacts(vocabulary, length, *kind.get_bounds(length, shape))

    def open(self, selection: SequenceSelection, reading: Reading) -> SequenceReader:
        return SequenceReader(selection, self.describe(selection, reading.role), reading)


class SequenceReader(WindowReader):
    """Makes the windows of a split."""

    def __init__(self, selection: SequenceSelection, facts: TokenFacts, reading: Reading) -> None:
        super().__init__(selection, facts, reading)
        self._selection = selection

    def load_windows(self, indices: np.ndarray) -> np.ndarray:
        """Return [n, T + 1] int64."""
        shape = self._selection.shape
        uniform = draw_uniform(self._selection.split, indices, self.facts.sequence_length + 1)
        return SEQUENCES[shape.kind].make(uniform, shape)

    def get_ids(self, indices: np.ndarray) -> tuple[str, ...]:
        return tuple(f"{self._selection.shape.kind}__{index}" for index in indices)

    def describe(self, index: int) -> str:
        return f"window {index} of {self._selection.shape.kind}"
