"""The table of features that were learnt without labels: its counting, and the claim itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import main
from lab.marked_tables import get_marks
from models.factory import build_model, export_model
from proofs.study.frame import StudyOutcome
from proofs.tables import labelfree_table
from proofs.tables.labelfree_table import LabelfreeTable, count_epochs
from store.record.history import read_metrics

# Random weights of the true shapes, but for the images' size and channels.
TEACHERS = (
    ("vit_small_patch14_dinov2", {"img_size": 28, "in_chans": 1}),
    ("vit_tiny_patch16_224", {"img_size": 32, "in_chans": 1, "depth": 2}),
)


def test_a_gain_is_counted_seed_by_seed():
    readings = [
        StudyOutcome("supervised", 0, {"linear": 80.0}, 1.0),
        StudyOutcome("cosine", 0, {"linear": 84.0}, 3.0),
        StudyOutcome("supervised", 1, {"linear": 82.0}, 1.0),
        StudyOutcome("cosine", 1, {"linear": 81.0}, 4.0),
    ]
    *_, base, taught = LabelfreeTable.format(readings).splitlines()
    assert base.endswith("| linear | 80.00 | 82.00 | 81.00 | 1.41 |  |  | 1 |")
    assert taught.endswith("| linear | 84.00 | 81.00 | 82.50 | 2.12 | +1.50 | 1 of 2 | 4 |")


def test_both_kinds_of_runs_take_as_many_steps():
    for epochs in (1, 20):
        assert count_epochs(epochs) * 2 == epochs * (1197 // 64)


@pytest.mark.slow
def test_features_without_labels_beat_supervised_ones_on_few_labels(digits_root, tmp_path, capsys):
    shutil.copytree(digits_root / "digits", tmp_path / "data/digits")
    docs = tmp_path / "docs.md"
    begin, end = get_marks("labelfree_table")
    docs.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    argv = [
        "--data-dir",
        str(tmp_path / "data"),
        "--docs",
        str(docs),
        f"--run.output_dir={tmp_path}",
        "--runtime.device=cpu",
        "--runtime.num_threads=1",
    ]
    assert labelfree_table.main(argv) == 0
    rows = [line.split(" | ") for line in docs.read_text().splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[1] in ("linear", "ridge")]
    assert len(rows) == 6
    for row in rows:
        if "no labels" in row[0]:
            assert row[-2] == "5 of 5" and float(row[-3]) > 2, row
    few = json.loads((tmp_path / "data/digits_few/1.0.0/dataset_info.json").read_text())["splits"]
    assert {one["name"]: one["shardLengths"] for one in few}["few_1"] == ["100"]
    assert labelfree_table.main([*argv, "--seeds", "7"]) == 2
    assert "without few_7" in capsys.readouterr().err


@pytest.fixture(scope="module")
def true_teachers(tmp_path_factory) -> list[dict]:
    sections = []
    for number, (name, args) in enumerate(TEACHERS):
        torch.manual_seed(number)
        folder = tmp_path_factory.mktemp(f"true{number}")
        facts = {"model": name, "args": args, "num_classes": 0, "mean": [127.5], "std": [127.5]}
        export_model(build_model(name, {**args, "num_classes": 0}).state_dict(), facts, folder)
        sections.append({"weights": str(folder), "size": args["img_size"]})
    return sections


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("xla", marks=pytest.mark.xla)])
def test_a_dinov2_like_teacher_of_another_width_teaches_in_one_graph(
    digits_root, true_teachers, tmp_path, device
):
    terms = [
        {"name": "cosine"},
        {"name": "gram_mse", "of": "patches"},
        {"name": "queue_kl", "teacher": 0, "args": {"size": 64}},
    ]
    flags = [
        "--config=configs/kd/digits_labelfree.yaml",
        f"--data.root={digits_root}",
        f"--run.output_dir={tmp_path}",
        "--run.experiment=e",
        "--run.run_id=whole",
        "--run.tensorboard=false",
        f"--runtime.device={device}",
        "--data.train_split=train[:64]",
        "--data.eval_split=validation[:32]",
        "--data.global_batch_size=16",
        "--data.eval_batch_size=32",
        "--train.epochs=1",
        "--optim.warmup_epochs=0",
        "--train.log_every_steps=1",
        "--train.checkpoint_every_steps=2",
        "--runtime.graph_budget=100000",
        f"--distill.teachers={json.dumps(true_teachers)}",
        f"--distill.losses={json.dumps(terms)}",
        "--distill.allow_weak_teacher",
    ]
    assert main.main(flags) == 0
    whole = tmp_path / "e/whole"
    trained = [line for line in read_metrics(whole) if line["kind"] == "train"]
    assert {line["graphs_train"] for line in trained} == {int(device == "xla")}
    part = Path(shutil.copytree(whole, whole.with_name("part")))
    shutil.rmtree(part / "checkpoints/step_00000004")
    assert main.main([*flags, "--run.run_id=part", "--resume=auto"]) == 0
    for name in ("model", "extra"):
        file = f"checkpoints/step_00000004/{name}.safetensors"
        then, now = load_file(whole / file), load_file(part / file)
        assert then.keys() == now.keys()
        assert all(np.array_equal(now[key], value) for key, value in then.items())
    widths = {value.shape[0] for key, value in then.items() if key.endswith("weight")}
    assert widths == {384, 192}  # of the projectors
