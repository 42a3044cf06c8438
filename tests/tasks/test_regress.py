"""Regression: columns, splits, statistics, losses and metrics, in closed form where possible."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import csv, parquet
from safetensors.torch import load_file
from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score

import main
from datasets import create_loader
from job.build import build_parts
from job.check import check
from store.record.history import read_metrics
from utils.config.load import RunConfig, load_config
from utils.runtime.launcher import create_runtime

NAMES = ("age", "rooms", "rent")
ROWS = 120


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """The same 120 rows of three columns as .npz, .csv and .parquet, sorted by the target."""
    folder = tmp_path_factory.mktemp("tables")
    generator = np.random.RandomState(0)
    age, rooms = generator.uniform(0, 90, ROWS), generator.randint(1, 6, ROWS).astype(float)
    rent = 300 + 200 * rooms - 2 * age + generator.randn(ROWS)
    columns = dict(zip(NAMES, (one[np.argsort(rent)] for one in (age, rooms, rent)), strict=True))
    np.savez(folder / "homes.npz", **columns)
    table = pa.table(columns)
    csv.write_csv(table, folder / "homes.csv")
    parquet.write_table(table, folder / "homes.parquet")
    two = np.stack([columns["rent"], -columns["age"]], axis=1)
    np.savez(folder / "two.npz", inputs=np.stack([age, rooms], axis=1), targets=two)
    np.savez(folder / "taxed.npz", **columns, tax=0.1 * columns["rent"] + columns["age"])
    (folder / "parts").mkdir()
    for name, part in (("train", table[:80]), ("validation", table[80:])):
        csv.write_csv(part, folder / "parts" / f"{name}.csv")
    return folder


def create_flags(root: Path, *flags: str) -> list[str]:
    """A run of the homes, 96 rows to train on."""
    chosen = () if "target_columns" in "".join(flags) else ("--data.target_columns=[rent]",)
    return [
        "--train.task=regress",
        "--data.source=arrays",
        f"--data.root={root}",
        "--data.name=homes.csv",
        *chosen,
        "--data.train_split=all[:80%]",
        "--data.eval_split=all[80%:]",
        "--data.global_batch_size=16",
        "--model=linear",
        "--runtime.device=cpu",
        "--run.tensorboard=false",
        "--runtime.graph_budget=100000",
        "--train.epochs=2",
        "--run.experiment=homes",
        "--run.run_id=a",
        *flags,
    ]


def load(root: Path, *flags: str) -> RunConfig:
    return load_config(create_flags(root, *flags))


def read_all(root: Path, role: str, *flags: str) -> torch.Tensor:
    """[N, D + O] of a role's evaluation or of an epoch of training."""
    loader = create_loader(load(root, *flags).data, role, seed=0)
    batch = loader.load_examples(range(loader.num_examples))
    return torch.cat([batch.inputs, batch.targets], dim=1)


def test_all_kinds_of_files_give_the_same_rows(root):
    found = [
        read_all(root, "train", f"--data.name=homes.{kind}") for kind in ("npz", "csv", "parquet")
    ]
    assert found[0].shape == (96, 3)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_columns_are_chosen_by_name(root):
    whole = read_all(root, "train")
    chosen = read_all(root, "train", "--data.input_columns=[rooms]")
    assert torch.equal(chosen, whole[:, [1, 2]])
    swapped = read_all(root, "train", "--data.target_columns=[age, rent]")
    assert torch.equal(swapped, whole[:, [1, 0, 2]])


def test_rows_are_permuted_only_by_the_split_seed(root):
    first = read_all(root, "train")
    order = np.random.RandomState(0).permutation(ROWS)
    assert torch.equal(first, read_all(root, "train", "--train.seed=5"))
    whole = np.stack([np.load(root / "homes.npz")[name] for name in NAMES], axis=1)
    assert torch.equal(first, torch.from_numpy(whole[order[:96]]).float())
    other = read_all(root, "train", "--data.split_seed=1")
    assert not torch.equal(first, other)
    # The file is sorted by its target: without a permutation the splits would not overlap.
    held_out = read_all(root, "eval")
    assert held_out[:, 2].min() < first[:, 2].median() < held_out[:, 2].max()


def test_a_directory_has_a_split_for_each_file(root):
    flags = ("--data.name=parts", "--data.train_split=train", "--data.eval_split=validation")
    assert len(read_all(root, "train", *flags)) == 80
    assert len(read_all(root, "eval", *flags)) == 40


@pytest.mark.parametrize("choice", ["both", "inputs", "targets", "none"])
def test_the_model_holds_the_requested_statistics(root, choice):
    train = read_all(root, "train").double().numpy()
    arguments = check(load(root, f"--data.standardise={choice}")).facts.model_arguments
    wanted = {}
    if choice in ("both", "inputs"):
        wanted |= {"input_mean": train[:, :2].mean(0), "input_std": train[:, :2].std(0)}
    if choice in ("both", "targets"):
        wanted |= {"target_mean": train[:, 2:].mean(0), "target_std": train[:, 2:].std(0)}
    assert arguments["statistics"].keys() == wanted.keys()
    for name, values in wanted.items():
        assert arguments["statistics"][name] == pytest.approx(values, rel=1e-6)


def create_parts(root: Path, *flags: str):
    job = check(load(root, *flags))
    return build_parts(create_runtime(job.config.runtime), job)


def count_split(parts) -> dict[str, float]:
    """The evaluation of untrained weights."""
    model = parts.state.model.eval()
    with torch.no_grad():
        sums = sum(parts.task.count(model, batch) for batch in parts.eval_loader.batches())
    return parts.task.summarise(sums).metrics


@pytest.mark.parametrize("standardise", ["both", "none"])
def test_metrics_equal_scikit_learns(root, standardise):
    flags = (
        "--data.name=two.npz",
        "--data.target_columns=[]",
        "--model=mlp",
        f"--data.standardise={standardise}",
        "--data.eval_batch_size=7",
    )
    parts = create_parts(root, *flags)
    metrics = count_split(parts)
    batch = parts.eval_loader.load_examples(range(24))
    with torch.no_grad():
        answers = parts.state.model.eval()(batch.inputs).double().numpy()
    targets = batch.targets.double().numpy()
    for name, function in (
        ("mse", mean_squared_error),
        ("mae", mean_absolute_error),
        ("r2", r2_score),
    ):
        each = function(targets, answers, multioutput="raw_values")
        assert metrics[name] == pytest.approx(each.mean(), rel=1e-5)
        assert metrics[f"{name}/targets[0]"] == pytest.approx(each[0], rel=1e-5)
        assert metrics[f"{name}/targets[1]"] == pytest.approx(each[1], rel=1e-5)
    assert metrics["examples"] == 24


@pytest.mark.parametrize("name", ["mse", "mae", "huber", "gaussian_nll"])
def test_each_loss_trains_its_statistic(root, name):
    parts = create_parts(root, f"--train.task_loss={name}", "--model=mlp")
    batch = next(iter(parts.train_loader.batches()))
    output = parts.task.loss(parts.state.model, batch)
    answers, train = parts.state.model(batch.inputs), read_all(root, "train")[:, 2].double()
    mean, std = train.mean(), train.std(correction=0)
    errors = (answers[:, 0] - batch.targets[:, 0]) / std
    wanted = {
        "mse": errors.square(),
        "mae": errors.abs(),
        "huber": torch.nn.functional.huber_loss(errors, torch.zeros_like(errors), reduction="none"),
    }
    if name == "gaussian_nll":
        normal = torch.distributions.Normal(answers[:, 0], (0.5 * answers[:, 1]).exp())
        # Densities of targets divided by their spread are `std` times as large.
        wanted[name] = -normal.log_prob(batch.targets[:, 0]) - std.log()
        assert count_split(parts)["nll"] > 0
    assert output.total.item() == pytest.approx(wanted[name].mean().item(), rel=1e-5)
    assert float(mean) == pytest.approx(float(parts.state.model.outputs.mean), rel=1e-6)


def test_the_penalty_applies_to_matrices_only(root):
    flags = ("--model=mlp", "--model.args.widths=[4]")
    plain, ridge = (create_parts(root, *flags, *more) for more in ((), ("--train.l2_penalty=0.5",)))
    batch = next(iter(plain.train_loader.batches()))
    totals = [parts.task.loss(parts.state.model, batch).total.item() for parts in (plain, ridge)]
    model = ridge.state.model
    squares = sum(
        layer.weight.square().sum().item()
        for layer in model.modules()
        if isinstance(layer, torch.nn.Linear)
    )
    assert totals[1] - totals[0] == pytest.approx(0.5 * squares, rel=1e-5)


def test_an_export_predicts_in_the_datas_units(root, tmp_path, capsys):
    flags = create_flags(
        root,
        f"--run.output_dir={tmp_path}",
        "--train.epochs=30",
        "--optim.lr=0.1",
        "--opt=sgd",
        "--optim.weight_decay=0",
    )
    assert main.main(flags) == 0
    run = tmp_path / "homes" / "a"
    final = json.loads((run / "run.json").read_text())["final"]
    assert final["eval_r2"] > 0.99 and final["score"] == -final["eval_mse"]
    assert {"mse", "mae", "r2"} <= read_metrics(run)[-1].keys()
    tensors = load_file(run / "student.safetensors")
    held_out = read_all(root, "eval")
    scaled = (held_out[:, :2] - tensors["inputs.mean"]) / tensors["inputs.std"]
    answers = scaled @ tensors["head.weight"].T + tensors["head.bias"]
    answers = answers * tensors["outputs.std"] + tensors["outputs.mean"]
    error = (answers[:, 0] - held_out[:, 2]).square().mean().item()
    assert final["eval_mse"] == pytest.approx(error, rel=1e-4)
    # Whoever reads other training rows still gets these statistics, from the weights.
    capsys.readouterr()
    other = [flag.replace("all[:80%]", "all[:40]") for flag in create_flags(root)]
    assert main.main([*other, "--eval", f"--model.weights={run}"]) == 0
    assert f"mse {final['eval_mse']:.4g}, " in capsys.readouterr().err
    facts = json.loads((run / "student.json").read_text())
    assert (facts["input_columns"], facts["target_columns"]) == (["age", "rooms"], ["rent"])


def test_resuming_on_changed_data_of_the_same_name_is_refused(root, tmp_path, capsys):
    place = tmp_path / "tables"
    place.mkdir()
    values = dict(np.load(root / "homes.npz"))
    np.savez(place / "homes.npz", **values)
    own = ("--data.name=homes.npz", f"--run.output_dir={tmp_path}", "--train.steps=2")
    assert main.main(create_flags(place, *own)) == 0
    values["rent"][7] += 1
    np.savez(place / "homes.npz", **values)
    flags = create_flags(place, *own, "--resume=auto")
    flags[flags.index("--train.steps=2")] = "--train.steps=3"
    capsys.readouterr()
    assert main.main(flags) == 2
    assert "data.name: version was" in capsys.readouterr().err.splitlines()[-1]
