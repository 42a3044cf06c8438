"""What a regression refuses: one line with key, value and way out, code 2, and nothing written."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest

import main
from tests.tasks.test_regress import create_flags
from tests.tasks.test_regress import root as root

BAD = {
    "nan.csv": "age,rent\n1,2\n2,\n3,4\n",
    "text.csv": "city,rent\nParis,2\nRome,3\n",
    "twice.csv": "age,age,rent\n1,2,3\n4,5,6\n",
    "flat.csv": "age,rent\n" + "7,1\n7,2\n" * 20,
    "ragged.csv": "age,rent\n1,2\n3\n",
    "empty.csv": "",
    "header.csv": "age,rent\n",
    "excel.csv": "age;rooms;rent\n1;2,5;3\n",
    "tabs.csv": "age\trent\n1\t2\n",
    "gaps.csv": "age,rent\n\n1,2\n2,3\n3,n/a\n",
    "large.csv": "age,rent\n1,2\n2,1e39\n",
    "table.xlsx": "PK",
}
FITS = ("--data.train_split=all", "--data.eval_split=all", "--data.global_batch_size=1")


@pytest.fixture(scope="module")
def bad(root) -> Path:
    """The good tables with bad ones beside them."""
    for name, text in BAD.items():
        (root / name).write_text(text)
    age = np.arange(40.0)
    np.savez(root / "inf.npz", inputs=np.where(age == 17, np.inf, age), targets=age)
    np.savez(root / "huge.npz", inputs=np.where(age == 3, 1e39, age), targets=age)
    np.savez(root / "far.npz", inputs=age + 1e9, targets=age)
    np.savez(root / "uneven.npz", inputs=age[:30], targets=age)
    np.savez(root / "cube.npz", inputs=age.reshape(10, 2, 2), targets=age[:10])
    np.savez(root / "pickled.npz", inputs=np.array([{}], dtype=object), targets=age[:1])
    (root / "broken.npz").write_bytes((root / "inf.npz").read_bytes()[:200])
    with (root / "single.npz").open("wb") as file:
        np.save(file, age)
    with zipfile.ZipFile(root / "foreign.npz", "w") as archive:
        archive.writestr("inputs", "1,2")
    (root / "mixed").mkdir()
    (root / "mixed" / "train.csv").write_text("age,rent\n1,2\n3,4\n")
    (root / "mixed" / "validation.csv").write_text("years,rent\n1,2\n3,4\n")
    (root / "nothing").mkdir()
    return root


WRONG = [
    (
        ("--data.name=nan.csv", *FITS),
        "'rent' holds no number (an empty cell, n/a or nan) in line 3",
        "1 such in all; correct",
    ),
    (("--data.name=gaps.csv", *FITS), "holds no number", "in line 4 (without empty ones)"),
    (("--data.name=large.csv", *FITS), "column 'rent' holds 1e+39 in line 3", "drop these rows"),
    (("--data.name=excel.csv", *FITS), "its fields are separated by semicolons (;)", "with commas"),
    (("--data.name=tabs.csv", *FITS), "its fields are separated by tabs", "save it with commas"),
    (
        ("--data.name=inf.npz", "--data.target_columns=[targets]", *FITS),
        "column 'inputs' holds inf in row 17",
        "drop these rows",
    ),
    (
        ("--data.name=huge.npz", "--data.target_columns=[targets]", *FITS),
        "holds 1e+39 in row 3",
        "",
    ),
    (
        ("--data.name=text.csv", *FITS),
        "column 'city' of text.csv holds 'Paris', which is",
        "encode it",
    ),
    (("--data.input_columns=[agge]",), "homes.csv has no column 'agge'", "did you mean 'age'?"),
    (
        ("--data.target_columns=[rentt]",),
        "data.target_columns: homes.csv has no column 'rentt'",
        "did you mean 'rent'",
    ),
    (
        ("--data.target_columns=[]",),
        "data.target_columns is empty and homes.csv has no column",
        "age, rooms, rent",
    ),
    (("--data.input_columns=[rent, age]",), "both name 'rent'", "remove it from one"),
    (("--data.input_columns=[age, age]",), "data.input_columns names 'age' twice", "once"),
    (("--data.name=twice.csv", *FITS), "twice.csv has two columns 'age'", "rename"),
    (
        ("--data.name=flat.csv", *FITS),
        "the input column 'age' is constant (7) on data.train_split",
        "remove it from data.input_columns",
    ),
    (
        ("--data.name=flat.csv", "--data.target_columns=[age]", *FITS),
        "the target column 'age' is constant",
        "data.target_columns",
    ),
    (
        ("--data.name=far.npz", "--data.target_columns=[targets]", *FITS),
        "has a spread of 11.5434 about 1e+09",
        "subtract its mean",
    ),
    (
        ("--teacher=resnet18", "--kd=prediction_mse"),
        "distill.teacher ('resnet18') takes no rows",
        "linear, mlp",
    ),
    (("--data.name=ragged.csv", *FITS), "data.name (ragged.csv) cannot be read as csv", "whole?"),
    (("--data.name=empty.csv", *FITS), "data.name (empty.csv) cannot be read as csv", ""),
    (("--data.name=header.csv", *FITS), "data.name (header.csv): column 'age' has no rows", "add"),
    (
        ("--data.name=single.npz", "--data.target_columns=[targets]", *FITS),
        "data.name (single.npz) holds one array without a name",
        "numpy.savez",
    ),
    (
        ("--data.name=foreign.npz", "--data.target_columns=[targets]", *FITS),
        "data.name (foreign.npz): 'inputs' is not an array",
        "drop it",
    ),
    (("--data.name=broken.npz", *FITS), "data.name (broken.npz) cannot be read as npz", "whole?"),
    (
        ("--data.name=pickled.npz", "--data.target_columns=[targets]", *FITS),
        "data.name (pickled.npz) cannot be read as npz",
        "",
    ),
    (("--data.name=table.xlsx", *FITS), "is not a readable table", ".npz, .csv, .parquet"),
    (
        ("--data.name=uneven.npz", "--data.target_columns=[targets]", *FITS),
        "'inputs' has 30 rows and 'targets' 40",
        "needs both",
    ),
    (
        ("--data.name=cube.npz", "--data.target_columns=[targets]", *FITS),
        "'inputs' of cube.npz has shape (10, 2, 2)",
        "[N, k]",
    ),
    (
        (
            "--data.name=mixed",
            "--data.train_split=train",
            "--data.eval_split=validation",
            "--data.global_batch_size=1",
        ),
        "validation.csv has input columns years, train.csv has age",
        "data.input_columns",
    ),
    (("--data.name=nothing",), "is a directory without .npz, .csv, .parquet", "train.csv"),
    (("--data.name=home.csv",), "data.name (home.csv) is not in data.root", "'homes.csv'"),
    (("--data.name=",), "data.name is empty", "such as houses.csv"),
    (("--data.train_split=train",), "the dataset has no split 'train'", "known: all"),
    (("--data.eval_split=all[:0]",), "data.eval_split (all[:0]) selects no example", "widen"),
    (
        ("--data.global_batch_size=97",),
        "data.global_batch_size (97) exceeds the 96 examples",
        "lower it",
    ),
    (("--data.order=sharded",), "data.order (sharded) needs files", "order=exact"),
    (
        ("--train.task_loss=mes",),
        "unknown train.task_loss 'mes' for train.task=regress",
        "did you mean 'mse'",
    ),
    (("--model=resnet18",), "model.name ('resnet18') takes no rows of numbers", "linear, mlp"),
    (("--model=mlp", "--model.args.widths=[0]"), "model.args.widths ([0])", "[64, 64]"),
    (
        ("--model=mlp", "--model.args.activation=rellu"),
        "model.args.activation ('rellu')",
        "did you mean 'relu'",
    ),
    (
        ("--model=mlp", "--model.args.width=[9]"),
        "model.args.width ([9]) is no argument of 'mlp'",
        "did you mean 'widths'",
    ),
    (("--mixup=0.5",), "mixup_alpha (0.5) is not supported with train.task=regress", "remove"),
    (("--data.eval_pp=decode",), "eval_pp ('decode') is not supported with train.task=regress", ""),
    (("--data.sequence_length=9",), "data.sequence_length (9) is not supported", "remove it"),
    (
        ("--data.source=synthetic_rows", "--data.name=friedman2"),
        "not a formula of synthetic rows",
        "did you mean 'friedman1'",
    ),
    (
        ("--data.source=synthetic_rows", "--data.name=linear,nois=1"),
        "'nois=1' does not describe synthetic rows",
        "noise=1",
    ),
    (
        ("--data.source=synthetic_rows", "--data.name=linear,noise=-1"),
        "whole numbers, and noise 0 or more, such as 0.5 or 1e-3",
        "noise=1",
    ),
    (
        ("--data.source=synthetic_rows", "--data.name=linear,num_inputs=1e1"),
        "'num_inputs=1e1' does not describe synthetic rows",
        "num_inputs=10",
    ),
    (
        ("--data.source=sklearn", "--data.name=diabetis"),
        "is not a scikit-learn table",
        "did you mean 'diabetes'",
    ),
    (
        ("--data.source=sklearn", "--data.name=california_housing"),
        "is not in data.root",
        "--allow-download",
    ),
    (("--data.source=synthetic", "--data.name=image_size=8"), "has no rows of numbers", "arrays"),
]


@pytest.mark.parametrize(("flags", "what", "way_out"), WRONG)
def test_bad_input_is_refused_in_one_line(bad, tmp_path, capsys, flags, what, way_out):
    runs = tmp_path / "runs"
    assert main.main(create_flags(bad, *flags, f"--run.output_dir={runs}")) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in captured.err
    assert what in lines[0] and way_out in lines[0]
    assert not runs.exists()


def test_a_task_refuses_the_keys_of_a_regression(tmp_path, capsys):
    flags = ["--data.source=synthetic", "--data.target_columns=[a]", "--model=resnet18"]
    assert main.main([*flags, f"--run.output_dir={tmp_path}"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "data.target_columns (('a',)) is not supported with train.task=classify" in line
