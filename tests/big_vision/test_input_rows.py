"""Data of rows without a file: formulas, their stated noise, and scikit-learn's tables."""

from __future__ import annotations

from dataclasses import replace

import joblib
import numpy as np
import pytest
from sklearn.datasets import load_diabetes, load_linnerud
from sklearn.linear_model import LinearRegression

from big_vision.input.rows.example_rows import FORMULAS, RowShape, make_rows, parse_row_name
from datasets import create_source
from tools.prepare_dataset.__main__ import main as prepare
from utils.config.data import DataSection


@pytest.mark.parametrize("kind", FORMULAS)
def test_the_best_mse_is_the_square_of_the_stated_noise(kind):
    shape = parse_row_name(f"{kind},noise=2,num_examples=20000,num_targets=2,seed=3")
    inputs, targets = make_rows(shape)
    same, clean = make_rows(replace(shape, noise=0.0))
    assert np.array_equal(inputs, same)
    noise = targets - clean
    assert (noise**2).mean(0) == pytest.approx([4.0, 4.0], rel=0.05)
    # Nothing of it is in the inputs: no model can know it.
    assert abs(LinearRegression().fit(inputs, noise).score(inputs, noise)) < 2e-3
    assert clean.std(0).min() > 2


def test_noise_may_be_written_with_an_exponent():
    assert parse_row_name("blobs,noise=1e-3,num_targets=2") == RowShape(
        "blobs", noise=0.001, num_targets=2
    )
    assert parse_row_name("blobs,noise=2.5e+1").noise == 25


def test_formulas_compute_what_they_are_named_after():
    inputs, targets = make_rows(parse_row_name("friedman1,noise=0,num_examples=50"))
    a, b, c, d, e = inputs.T[:5]
    wanted = 10 * np.sin(np.pi * a * b) + 20 * (c - 0.5) ** 2 + 10 * d + 5 * e
    np.testing.assert_allclose(targets[:, 0], wanted)
    inputs, targets = make_rows(parse_row_name("linear,noise=0,num_examples=50,num_inputs=3"))
    assert LinearRegression().fit(inputs, targets).score(inputs, targets) == pytest.approx(1)
    assert np.abs(inputs).max() <= 1


def read(name: str, root: str = "", **columns: tuple[str, ...]):
    data = DataSection(source="sklearn", name=name, root=root, train_split="all", **columns)
    rows = create_source(data).select("train").rows
    order = np.random.RandomState(0).permutation(len(rows))
    return rows, order


def test_tables_of_scikit_learn_keep_their_raw_numbers_and_names():
    rows, order = read("diabetes")
    whole = load_diabetes(scaled=False)
    assert np.array_equal(rows.inputs, whole.data[order])
    assert rows.input_names == tuple(whole.feature_names)
    rows, order = read("linnerud", target_columns=("Waist",))
    assert np.array_equal(rows.targets[:, 0], load_linnerud().target[order, 1])
    assert rows.input_names == ("Chins", "Situps", "Jumps")


def test_california_is_downloaded_only_with_permission(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("ALLOW_DOWNLOAD", raising=False)
    root = tmp_path / "data"
    assert prepare(["california_housing", "--root", str(root)]) == 2
    assert "allow it by --allow-download" in capsys.readouterr().err
    assert not root.exists()
    # As scikit-learn keeps it: nine columns of the archive, the last one the value.
    root.mkdir()
    kept = np.random.RandomState(0).uniform(1, 2, (20640, 9))
    joblib.dump(kept, root / "cal_housing_py3.pkz", compress=1)
    assert prepare(["california_housing", "--root", str(root)]) == 0
    rows, _ = read("california_housing", str(root))
    assert rows.inputs.shape == (20640, 8) and rows.target_names == ("MedHouseVal",)
