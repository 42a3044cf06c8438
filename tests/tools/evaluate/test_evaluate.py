"""`python -m tools.evaluate`: several sets at once, its report, and what is refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from sklearn.metrics import confusion_matrix

from models.factory import export_model
from models.trained import open_trained
from tasks.evaluation.sets import CORRUPTIONS
from tests.support.evaluated_sets import NAMES, Examples, load_examples, shift, write_set
from tools.evaluate.__main__ import main

A_CLASSES = (1, 4, 7)
SHIFTED = shift(load_examples(101, 1), 2)
A = load_examples(45, 3, A_CLASSES)
REAL = load_examples(60, 2)
REAL_LABELS = [
    [label] if i % 3 else [label, (label + 1) % 10] for i, label in enumerate(REAL.labels)
]


@pytest.fixture(scope="module")
def sets_root(tmp_path_factory, digits_root) -> Path:
    """A directory of sets beside the digits."""
    root = tmp_path_factory.mktemp("sets")
    (root / "digits").symlink_to(digits_root / "digits")
    write_set(root, "shifted", "test", SHIFTED)
    write_set(root, "imagenet2012_real", "validation", Examples(REAL.images, REAL_LABELS))
    write_set(root, "imagenet_a", "test", A)
    write_set(root, "strange", "test", A, names=[f"n{name}" for name in NAMES])
    return root


def compute_probs(run: Path, images: np.ndarray, *, flip: bool = False) -> np.ndarray:
    """Compute a model's probabilities without the evaluation code."""
    trained = open_trained(str(run), "RUN")
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        probs = trained.model(pixels).softmax(1)
        if flip:
            probs = (probs + trained.model(pixels.flip(3)).softmax(1)) / 2
    return probs.numpy()


def run_tool(capsys, *flags: str) -> str:
    """What the tool says on stdout, of a run that goes well."""
    assert main([*flags, "--runtime.device=cpu"]) == 0
    return capsys.readouterr().out


def test_several_sets_are_evaluated_beside_a_teacher(teacher_run, sets_root, tmp_path, capsys):
    out = tmp_path / "report"
    text = run_tool(
        capsys,
        str(teacher_run),
        "--sets",
        "eval",
        "shifted=shifted@test",
        "imagenet_real",
        "imagenet_a",
        f"--data.root={sets_root}",
        "--data.eval_batch_size=32",
        f"--teacher={teacher_run}",
        "--out",
        str(out),
        "--json",
    )
    report = json.loads(text)
    assert report == json.loads((out / "report.json").read_text())
    found = {name: one["metrics"] for name, one in report["sets"].items()}
    final = json.loads((teacher_run / "run.json").read_text())["final"]
    for name in ("top1", "top5", "loss", "ece"):  # as the run itself was judged
        assert found["eval"][name] == pytest.approx(final[f"eval_{name}"], rel=1e-4), name

    probs = compute_probs(teacher_run, SHIFTED.images)
    assert found["shifted"]["top1"] == pytest.approx(
        100 * np.mean(probs.argmax(1) == SHIFTED.labels)
    )
    with (out / "shifted.confusion.csv").open() as file:
        rows = [row[1:] for row in csv.reader(file)][1:]
    expected = confusion_matrix(SHIFTED.labels, probs.argmax(1), labels=range(10))
    assert np.array_equal(np.array(rows, int), expected)
    hits = [
        p.argmax() in right
        for p, right in zip(compute_probs(teacher_run, REAL.images), REAL_LABELS, strict=True)
    ]
    assert found["imagenet_real"]["top1"] == pytest.approx(100 * np.mean(hits))
    assert report["sets"]["imagenet_real"]["classes"] == []
    chosen = np.array(A_CLASSES)[compute_probs(teacher_run, A.images)[:, A_CLASSES].argmax(1)]
    assert found["imagenet_a"]["top1"] == pytest.approx(100 * np.mean(chosen == A.labels))
    assert report["sets"]["imagenet_a"]["competing_classes"] == 3
    assert [row["name"] for row in report["sets"]["imagenet_a"]["classes"]] == ["1", "4", "7"]

    for row in report["shift"]:  # it is its own teacher
        assert row["agreement"] == 100.0 and row["only_first"] == row["only_second"] == 0.0
        assert row["both_right"] == pytest.approx(row["model_top1"])
    kept = report["shift"][1]["model_kept"]
    assert kept == pytest.approx(100 * found["shifted"]["top1"] / found["eval"]["top1"])
    for picture in ("shifted.confusion.png", "shifted.calibration.png"):
        assert (out / picture).read_bytes()[:4] == b"\x89PNG"


def test_the_worst_images_are_the_most_confident_errors(teacher_run, sets_root, tmp_path, capsys):
    out = tmp_path / "report"
    flags = (f"--data.root={sets_root}", "--data.eval_batch_size=16", "--out", str(out))
    run_tool(capsys, str(teacher_run), "--sets", "shifted=shifted@test", *flags, "--worst", "5")
    probs = compute_probs(teacher_run, SHIFTED.images)
    given, labels = probs.argmax(1), np.array(SHIFTED.labels)
    wrong = np.flatnonzero(given != labels)
    order = wrong[np.argsort(-probs[wrong].max(1), kind="stable")][:5]
    worst = json.loads((out / "report.json").read_text())["sets"]["shifted"]["worst"]
    assert [row["index"] for row in worst] == order.tolist()
    assert [row["answer"] for row in worst] == [NAMES[given[place]] for place in order]
    assert [row["label"] for row in worst] == [NAMES[labels[place]] for place in order]
    assert [row["confidence"] for row in worst] == pytest.approx(
        probs[order].max(1).tolist(), rel=1e-4
    )
    assert (out / "shifted.worst.png").read_bytes().startswith(b"\x89PNG")
    assert main([str(teacher_run), "--sets", "shifted=shifted@test", "--worst", "5"]) == 2
    assert "add --out DIR" in capsys.readouterr().err


def test_mirrored_evaluation_and_probes_print_to_a_terminal(teacher_run, sets_root, capsys):
    text = run_tool(
        capsys,
        str(teacher_run),
        "--sets",
        "shifted=shifted@test",
        f"--data.root={sets_root}",
        "--flip",
        "--per-class",
        "2",
        "--probes",
        "knn",
        "fewshot",
        "linear",
        "--probe-epochs=2",
        "--data.train_split=train[:200]",
    )
    probs = compute_probs(teacher_run, SHIFTED.images, flip=True)
    top1 = 100 * np.mean(probs.argmax(1) == SHIFTED.labels)
    row = next(line for line in text.splitlines() if line.startswith("shifted "))
    assert row.split()[1:4] == ["101", "10", f"{top1:.2f}"]
    assert "shifted: the classes of least recall" in text
    assert "probes of 16 features: 200 examples of train[:200]" in text
    kinds = [line.split()[0] for line in text.splitlines() if line.split()[:1] != []]
    assert {"k-NN", "few-shot", "linear"} <= set(kinds)


def test_sets_that_cannot_be_evaluated_give_one_line(teacher_run, sets_root, tmp_path, capsys):
    run, root = str(teacher_run), f"--data.root={sets_root}"
    args = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
    facts = {
        "model": "vit_tiny_patch16_224",
        "args": args,
        "num_classes": 10,
        "eval_pp": "decode|resize(8)|value_range(-1, 1)",
    }
    (tmp_path / "teacher").mkdir()
    model = timm.create_model(facts["model"], num_classes=10, **args)
    export_model(model.state_dict(), facts, tmp_path / "teacher")
    for flags, words in (
        (["nowhere"], "is neither a path nor a model of timm"),
        ([run, root, "--sets", "imagenet_real2"], "did you mean 'imagenet_real'"),
        ([run, root, "--sets", "{name: x"], "is no mapping"),
        ([run, root, "--sets", "{name: x, datset: y}"], "did you mean"),
        ([run, root, "--sets", "imagenet_r"], "holds no such dataset"),
        ([run, root, "--sets", "x=strange@test"], "10 of its 10 classes are unknown to the model"),
        ([run, root, "--sets", "x=strange@tset"], "no split 'tset'"),
        ([run, root, "--sets", "eval", "eval"], "two sets have the name"),
        ([run, root, "--teacher", "nowhere"], "--teacher ('nowhere')"),
        ([run, root, "--teacher", str(tmp_path / "teacher")], "it takes 3 channels and sees 1"),
        ([run, root, "--sets", "imagenet_real", "--train.task=multilabel"], "by one output for"),
        ([run, root, "--probes", "knn", "--data.eval_split=nosplit"], "no split 'nosplit'"),
        ([run, root, "--probes", "knn", "--data.train_split=no"], "data.train_split (no)"),
        ([run, root, "--probes", "linear", "--data.train_split=train[:1]"], "holds one example"),
        (
            [run, root, "--probes", "knn", "--pp=decode(channels=1)|resize(9)|value_range(-1, 1)"],
            "gives images of 9 x 9 x 1, which the model does not take",
        ),
        ([run, root, "--data.rot=x"], "unknown flag --data.rot"),
        ([run, root, "--probes", "svm"], "invalid choice: 'svm'"),
        ([run, root, "--out", str(teacher_run / "run.json")], "--out"),
    ):
        try:
            code = main([*flags, "--runtime.device=cpu"])
        except SystemExit as stop:
            code = stop.code
        err = capsys.readouterr().err.strip()
        last = err.splitlines()[-1]
        assert code == 2 and last.startswith("error: "), flags
        assert words in last, (flags, last)


@pytest.mark.slow
def test_two_ranks_report_the_same_as_one(teacher_run, sets_root, tmp_path, capsys):
    reports = []
    for count in (1, 2):
        out = tmp_path / str(count)
        run_tool(
            capsys,
            str(teacher_run),
            "--sets",
            "eval",
            "imagenet_real",
            "imagenet_a",
            f"--data.root={sets_root}",
            "--data.eval_batch_size=32",
            "--out",
            str(out),
            f"--runtime.num_processes={count}",
            "--probes",
            "knn",
            "fewshot",
            "linear",
            "--probe-epochs=3",
        )
        reports.append(json.loads((out / "report.json").read_text()))
    one, two = reports
    for name in one["sets"]:
        assert one["sets"][name]["metrics"] == pytest.approx(two["sets"][name]["metrics"])
        assert one["sets"][name]["classes"] == two["sets"][name]["classes"]
    assert one["probes"]["knn"] == two["probes"]["knn"]
    assert one["probes"]["fewshot"] == two["probes"]["fewshot"]
    linear = [report["probes"]["linear"]["chosen"] for report in reports]
    assert linear[0]["top1"] == pytest.approx(linear[1]["top1"], abs=0.5)


@pytest.mark.slow
def test_all_forms_of_weights_and_sources_are_evaluated(teacher_run, sets_root, tmp_path, capsys):
    """A checkpoint, a file without a word of its model, and a folder of some of the classes."""
    from PIL import Image

    for number, label in enumerate(A.labels):
        folder = tmp_path / "photos" / "test" / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(A.images[number, :, :, 0]).save(folder / f"{number}.png")
    place = tmp_path / "photos"
    section = f"{{name: mine, source: folder, root: {place}, split: test}}"
    weights = tmp_path / "weights.pth"
    torch.save({"state_dict": open_trained(str(teacher_run), "RUN").model.state_dict()}, weights)
    size = json.dumps(
        {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 1, "num_heads": 2}
    )
    config = Path(__file__).parents[3] / "configs" / "digits_student.yaml"
    bare = [
        "--model=vit_tiny_patch16_224",
        "--model-args",
        size,
        "--classes=10",
        f"--config={config}",
    ]
    found = []
    for flags in (
        [str(teacher_run), section],
        [str(teacher_run / "checkpoints"), section],
        # Nobody tells what its classes are called: the config's dataset does.
        [str(weights), section, *bare],
    ):
        argv = [flags[0], *flags[2:], f"--data.root={sets_root}", "--json", "--sets", flags[1]]
        found.append(json.loads(run_tool(capsys, *argv))["sets"]["mine"])
    chosen = np.array(A_CLASSES)[compute_probs(teacher_run, A.images)[:, A_CLASSES].argmax(1)]
    assert found[0]["metrics"]["top1"] == pytest.approx(100 * np.mean(chosen == A.labels))
    assert found[0]["competing_classes"] == 3
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_the_mean_over_all_corruptions_is_reported(teacher_run, sets_root, tmp_path, capsys):
    errors = {}
    for number, (name, alexnet) in enumerate(CORRUPTIONS.items()):
        wrong = []
        for severity in range(1, 6):
            one = shift(load_examples(20, number), severity, seed=number)
            write_set(sets_root, f"imagenet2012_corrupted/{name}_{severity}", "validation", one)
            wrong.append(np.mean(compute_probs(teacher_run, one.images).argmax(1) != one.labels))
        errors[name] = 100 * np.mean(wrong) / alexnet
    text = run_tool(
        capsys, str(teacher_run), "--sets", "imagenet_c", f"--data.root={sets_root}", "--json"
    )
    report = json.loads(text)
    found = report["groups"]["imagenet_c"]["model"]
    assert len(report["sets"]) == found["sets"] == 75
    assert found["errors"] == pytest.approx(errors)
    assert found["mce"] == pytest.approx(np.mean(list(errors.values())))
