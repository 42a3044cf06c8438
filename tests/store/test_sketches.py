"""Quantiles of sketches: within their error, and the same bits in any order."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest

from proofs.benchmark_quantiles import EPSILONS, STREAMS, compute_worst, count_other_merges
from store.record.sketches import QuantileSketch, merge_sketches
from utils.errors import UserError


@pytest.mark.parametrize("name", STREAMS)
def test_no_quantile_is_off_by_more_than_its_epsilon(name):
    for epsilon in EPSILONS:
        assert max(compute_worst(name, epsilon, seed) for seed in range(2)) <= epsilon


def test_sketches_merge_bit_for_bit_in_any_order():
    assert count_other_merges() == 0


def make(values: list[float], epsilon: float = 0.01) -> QuantileSketch:
    sketch = QuantileSketch(epsilon)
    sketch.add(values)
    return sketch


def test_dropped_windows_leave_no_trace():
    """A run that goes back drops windows: the rest is as if they had never been."""
    draw = np.random.default_rng(1)
    windows = [draw.normal(5, 3, 100) for _ in range(20)]
    for kept in random.Random(2).sample(range(1, 20), 10):
        whole = make(np.concatenate(windows[:kept]))
        assert str(merge_sketches(make(one) for one in windows[:kept])) == str(whole)
        again = merge_sketches(make(one) for one in [*windows[:kept], *windows[kept:]])
        assert str(again) == str(make(np.concatenate(windows)))


def test_a_sketch_is_read_back_as_it_was_written():
    sketch = make([0.0, -1e-320, 1.5, -2.5, math.nan, math.inf, -math.inf, 1e308, -1e-300])
    again = QuantileSketch.from_json(json.loads(json.dumps(sketch.to_json(), allow_nan=False)))
    assert str(again) == str(sketch)
    assert again.special == {"nan": 1, "inf": 1, "-inf": 1} and again.count == 6
    again.merge(sketch)
    assert again.count == 12 and again.special["nan"] == 2
    empty = QuantileSketch.from_json(QuantileSketch().to_json())
    assert math.isnan(empty.get_quantile(0.5)) and empty.count == 0


def test_extremes_are_exact_and_the_largest_numbers_have_a_bin():
    largest = float(np.finfo(float).max)
    sketch = make([-largest, 0.25, largest])
    assert [sketch.get_quantile(q) for q in (0.0, 1.0)] == [-largest, largest]
    assert sketch.get_quantile(0.5) == pytest.approx(0.25, rel=0.01)


@pytest.mark.parametrize("epsilon", [0.0, 0.0004, 0.06, -1.0, math.nan])
def test_an_epsilon_out_of_range_is_refused(epsilon):
    with pytest.raises(UserError, match=r"quantile\.epsilon"):
        QuantileSketch(epsilon)


def test_sketches_of_different_epsilons_do_not_merge():
    with pytest.raises(UserError, match="cannot be merged"):
        make([1.0]).merge(make([1.0], epsilon=0.02))
