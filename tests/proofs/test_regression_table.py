"""The table of regressions: the same rows for every model, and a row for each of them."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_diabetes

from proofs.tables import regression_table
from utils.config.load import load_config


def test_all_models_see_the_rows_of_the_seed():
    seen = {}
    for seed in (0, 1):
        config = load_config(regression_table.get_flags("diabetes_mlp", seed))
        seen[seed] = regression_table.read_rows(config, "test")
        assert config.train.seed == seed
    whole = load_diabetes(scaled=False)
    order = np.random.RandomState(1).permutation(442)[round(0.8 * 442) :]
    np.testing.assert_array_equal(seen[1][0], whole.data[order])
    np.testing.assert_array_equal(seen[1][1][:, 0], whole.target[order])
    assert not np.array_equal(seen[0][0], seen[1][0])


def test_least_squares_of_scikit_learn_is_evaluated_on_the_test_rows():
    found = regression_table.fit_sklearn("LinearRegression", "diabetes_linear", 0)
    config = load_config(regression_table.get_flags("diabetes_linear", 0))
    (xs, ys), (seen, wanted) = (
        regression_table.read_rows(config, role) for role in ("train", "test")
    )
    ones = np.ones((len(xs), 1))
    weights, *_ = np.linalg.lstsq(np.hstack([ones, xs]), ys, rcond=None)
    errors = np.hstack([ones[: len(seen)], seen]) @ weights - wanted
    assert found == pytest.approx(1 - (errors**2).mean() / wanted.var(), rel=1e-6)


def test_a_row_shows_each_seed_mean_and_spread():
    row = regression_table.format_row("diabetes", "x", [0.5, 0.3])
    assert row == "| diabetes | x | 0.500 / 0.300 | 0.400 | 0.141 |"


@pytest.mark.slow
def test_a_table_has_five_rows_of_one_set(capsys):
    assert regression_table.main(["--seeds", "1", "--tables", "linnerud"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| linnerud"] * 5
