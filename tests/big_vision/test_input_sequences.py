"""Synthetic sequences: declared bounds against counted entropies, and independent windows."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from big_vision.input.text.sequences import SEQUENCES, draw_uniform, parse_sequence_name
from datasets import create_loader
from utils.config.data import DataSection
from utils.errors import UserError

COUNT = 100_000
# Small enough that windows repeat thousands of times: their entropy can be counted.
NAMES = {
    "copy,symbols=3": 8,
    "reverse,symbols=3": 8,
    "counting,symbols=5,strides=3": 6,
    "recall,symbols=3": 8,
    "recall,symbols=2,keys=4": 8,
    "rewrite,symbols=2,keys=2": 12,
    "dyck,symbols=2,depth=3": 7,
    "noise,symbols=3": 6,
    "selective_copy,symbols=3": 12,
    "copy,symbols=3,rounds=2": 10,
}


def make(name: str, length: int, indices: np.ndarray) -> np.ndarray:
    shape = parse_sequence_name(name)
    return SEQUENCES[shape.kind].make(draw_uniform(1, indices, length + 1), shape)


def count_entropy(rows: np.ndarray) -> float:
    """Compute nats with the first-order correction for a finite sample (Miller 1955)."""
    counts = np.array(list(Counter(map(bytes, np.atleast_2d(rows.astype(np.uint8)))).values()))
    shares = counts / counts.sum()
    return float(-(shares * np.log(shares)).sum()) + (len(counts) - 1) / (2 * counts.sum())


@pytest.mark.parametrize(("name", "length"), NAMES.items())
def test_declared_loss_bounds_match_counted_entropies(name, length):
    windows = make(name, length, np.arange(COUNT))
    shape = parse_sequence_name(name)
    floor, ceiling = SEQUENCES[shape.kind].get_bounds(length, shape)
    counted = (count_entropy(windows) - count_entropy(windows[:, :1])) / length
    assert counted == pytest.approx(floor, abs=0.004)
    alone = [count_entropy(windows[:, [place]]) for place in range(1, length + 1)]
    assert np.mean(alone) == pytest.approx(ceiling, abs=0.004)
    assert windows.min() == 0
    assert windows.max() == SEQUENCES[shape.kind].count_tokens(length, shape) - 1


def test_predictable_tokens_follow_from_the_window():
    """Check the part of each window that a model can predict."""
    copied, reversed_ = (
        make(f"{kind},symbols=9", 8, np.arange(50)) for kind in ("copy", "reverse")
    )
    assert (copied[:, 5:] == copied[:, :4]).all()
    assert (reversed_[:, 5:] == reversed_[:, 3::-1]).all()
    for row in make("selective_copy,symbols=9", 16, np.arange(50)):
        assert row[12] == 10
        assert [token for token in row[:12] if token != 9] == row[13:].tolist()
    for kind, order in (("copy", 1), ("reverse", -1)):
        rows = make(f"{kind},symbols=9,rounds=3", 22, np.arange(50))
        for start in (0, 8, 16):
            assert (rows[:, start + 4 : start + 7] == rows[:, start : start + 3][:, ::order]).all()
        assert (rows[:, [3, 7, 11, 15, 19]] == 9).all()
    steps = np.diff(make("counting,symbols=9", 8, np.arange(50))) % 9
    assert (steps == steps[:, :1]).all()
    recalled = make("recall,symbols=9", 12, np.arange(50))
    for row in recalled:
        pairs = dict(zip(row[:6:2], row[1:6:2], strict=True))
        assert len(pairs) == 3
        assert [pairs[key] for key in row[7::2]] == row[8::2].tolist()
    assert all(len(set(row)) == 3 for row in make("recall,keys=5", 12, np.arange(99))[:, :6:2])
    written = make("rewrite,symbols=9,keys=3", 24, np.arange(50))
    for row in written:
        latest = dict(zip(row[:12:2], row[1:12:2], strict=True))
        assert [latest[key] for key in row[13::2]] == row[14::2].tolist()
    for row in make("dyck,symbols=3,depth=2", 30, np.arange(50)):
        stack = []
        for token in row:
            if token < 3:
                stack.append(token)
                assert len(stack) <= 2
            else:
                assert stack.pop() == token - 3


@pytest.mark.parametrize(
    ("name", "length", "judged"),
    [
        ("copy,symbols=9", 8, (4, 5, 6, 7)),
        ("reverse,symbols=9", 6, (3, 4, 5)),
        ("copy,symbols=9,rounds=2", 14, (3, 4, 5, 11, 12, 13)),
        ("selective_copy,symbols=9", 16, (12, 13, 14, 15)),
        ("recall,symbols=9,keys=7", 12, (7, 9, 11)),
        ("rewrite,symbols=9,keys=2", 12, (7, 9, 11)),
    ],
)
def test_answer_tokens_follow_from_their_window_with_loss_zero(name, length, judged):
    """Each answer token is a symbol that its round showed before the first one is asked for."""
    data = DataSection(source="sequences", name=f"{name},answers=1", sequence_length=length)
    loader = create_loader(data, "eval", seed=0)
    facts, tokens = loader.facts, loader.load_examples(range(200)).tokens.numpy()
    assert facts.judged == judged
    assert (facts.floor, facts.ceiling) == (0.0, math.log(9))
    plain = create_loader(data.model_copy(update={"name": name}), "eval", seed=0)
    assert (plain.load_examples(range(200)).tokens.numpy() == tokens).all()
    assert plain.facts.judged == ()
    part = (length + 2) // parse_sequence_name(name).rounds
    for start in range(0, length, part):
        own = [place for place in judged if start <= place < start + part]
        for row in tokens:
            assert {row[place + 1] for place in own} <= set(row[start : own[0]])


def test_a_window_depends_only_on_split_and_index():
    data = DataSection(source="sequences", name="noise,symbols=90", sequence_length=30)
    data = data.model_copy(update={"global_batch_size": 8})
    loaders = [
        create_loader(data, role, seed=seed) for role in ("train", "eval") for seed in (0, 1)
    ]
    found = [loader.load_examples([7, 3]).tokens.numpy() for loader in loaders]
    assert (found[0] == found[1]).all() and (found[2] == found[3]).all()
    assert (found[0] != found[2]).mean() > 0.5
    other = loaders[0].load_examples([3, 9, 7]).tokens.numpy()
    assert (other[[2, 0]] == found[0]).all()
    assert loaders[0].facts.floor == loaders[0].facts.ceiling < math.log(90)


@pytest.mark.parametrize(
    ("name", "length", "words"),
    [
        ("recall", 10, r"\(10\) does not suit recall; make it a multiple of 4, 8"),
        ("copy", 2, r"make it a multiple of 2, 4 or more"),
        ("counting,strides=9", 8, r"strides \(9\) exceeds symbols \(8\)"),
        ("copy,symbols=0", 8, r"symbols \(0\) must be at least 1"),
        ("copy,answers=0", 8, r"answers \(0\) must be at least 1; raise it, or leave"),
        (
            "dyck,answers=1",
            8,
            "not supported with dyck.*choose copy, reverse, selective_copy, recall, rewrite",
        ),
        ("copy,keys=9", 8, "keys are only for recall and rewrite"),
        ("copy,rounds=2,rounds=3", 10, "has rounds twice"),
        ("copy,answers=2", 8, "answers must be 1 or left out"),
        ("recall,rounds=2", 16, "rounds are only for copy and reverse"),
        ("copy,rounds=3", 18, r"\(18\) does not suit 3 rounds of copy.* multiple of 6, 16 or more"),
        ("copy,rounds=3", 10, "16 or more"),
        ("recall,keys=3", 16, r"keys \(3\) are fewer than the 4 pairs.*or choose rewrite"),
        ("copy,kind=3", 8, "'kind=3' does not describe a sequence"),
    ],
)
def test_impossible_sequences_are_refused(name, length, words):
    data = DataSection(source="sequences", name=name, sequence_length=length)
    with pytest.raises(UserError, match=words):
        create_loader(data, "eval", seed=0)


@pytest.mark.parametrize(
    ("name", "length", "least", "most"),
    [
        ("copy,symbols=4", 8, 1.0, 1.0),
        ("recall,symbols=4", 8, 1.0, 1.0),
        ("copy,symbols=16", 16, 0.0, 0.0),
        ("recall,symbols=256", 8, 0.05, 0.1),
    ],
)
def test_splits_share_windows_if_few_distinct_ones_exist(name, length, least, most):
    """Check docs/language.md on held-out windows that the training split has, too."""
    data = DataSection(
        source="sequences",
        name=f"{name},num_examples=40000,num_held_out=1000",
        sequence_length=length,
    )
    trained, held_out = (
        create_loader(data, role, seed=0).load_examples(range(count)).tokens.numpy()
        for role, count in (("train", 40_000), ("eval", 1_000))
    )
    seen = set(map(bytes, trained))
    assert least <= np.mean([bytes(window) in seen for window in held_out]) <= most
