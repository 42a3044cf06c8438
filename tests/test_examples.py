"""The examples: every command of their pages as it is printed, and the program in README.md."""

from __future__ import annotations

import csv
import json
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from examples.own_images.make_images import main as make_images
from store.record.history import read_metrics
from tests.support.child_runs import ROOT, get_environment
from tests.test_documented_runs import COMMANDS, Workplace, end_after_a_step, get_flags

EXAMPLES = ROOT / "examples"
BROKEN_OFF = "python main.py --config examples/own_images/images.yaml --run.run_id=first"


def run_page(place: Workplace, name: str) -> None:
    """Run the commands of an example in their order; the run of BROKEN_OFF gets a SIGTERM."""
    for command in COMMANDS[f"examples/{name}/README.md"]:
        if "examples/own_loss/" in command:
            run_apart(place, command)
        elif command == BROKEN_OFF:
            with end_after_a_step():
                assert place.run(command).code == 75
        else:
            assert place.run(command).code == 0, command


def run_apart(place: Workplace, command: str) -> None:
    """Run main.py in a process of its own, in which the modules that it imports stay."""
    program = [sys.executable, str(ROOT / "main.py"), *shlex.split(command)[2:]]
    done = start([*program, *get_flags(command)], place.folder)
    assert done.returncode == 0, done.stderr[-3000:]


def start(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**get_environment(), "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def read_run(place: Workplace, name: str) -> dict:
    facts = json.loads((place.folder / "runs" / name / "run.json").read_text())
    assert facts["status"] == "complete"
    return facts


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Iterator[Workplace]:
    folder = tmp_path_factory.mktemp("examples")
    for name in ("examples", "docs", "configs"):
        (folder / name).symlink_to(ROOT / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield Workplace(folder, tmp_path_factory.mktemp("scratch"))


@pytest.fixture(scope="module")
def digits(workplace) -> Workplace:
    run_page(workplace, "digits")
    return workplace


@pytest.fixture(scope="module")
def images(workplace) -> Workplace:
    run_page(workplace, "own_images")
    return workplace


def test_every_example_has_its_page_and_little_else():
    folders = {path.name: path for path in EXAMPLES.iterdir() if (path / "README.md").is_file()}
    index = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\| \[(\w+)\]", index)) == set(folders)
    for folder in folders.values():
        files = [path for path in folder.iterdir() if path.is_file()]
        assert any(path.suffix == ".yaml" for path in files)
        assert sum(len(path.read_text().splitlines()) for path in files) <= 120


def test_a_student_of_the_digits_is_taught(digits):
    read_run(digits, "example_student/alone")
    facts = read_run(digits, "example_student/taught")
    assert len(facts["teachers"]) == 1
    taught = read_metrics(digits.folder / "runs/example_student/taught")
    assert taught[0]["loss/kd"] > 0
    compared = next(done for command, done in digits.done.items() if " compare " in command)
    assert "example_student" in compared.output and "top1" in compared.output


def test_an_own_loss_teaches(digits):
    run_page(digits, "own_loss")
    losses = [
        line["loss/log_gap"]
        for line in read_metrics(digits.folder / "runs/own_loss/first")
        if line["kind"] == "train"
    ]
    assert min(losses) > 0
    environment = json.loads((digits.folder / "runs/own_loss/first/environment.json").read_text())
    assert set(environment["imports"]) == {"my_loss"}


def test_own_images_are_trained_resumed_labelled_and_exported(images):
    assert read_run(images, "own_images/first")["attempts"] == 2
    with (images.folder / "answers.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 48 and {row["name_1"] for row in rows} <= {"disc", "square", "triangle"}
    exported = images.folder / "exported"
    assert {path.name for path in exported.iterdir() if path.is_dir()} == {"timm", "torch_export"}
    checked = next(done for command, done in images.done.items() if "--check" in command)
    assert checked.new == set()


def test_drawn_images_are_the_same_each_time(images, tmp_path):
    assert make_images([str(tmp_path)]) == 0
    for path in tmp_path.rglob("*.png"):
        drawn = images.folder / "shapes" / path.relative_to(tmp_path)
        assert path.read_bytes() == drawn.read_bytes()


def test_a_student_learns_features_without_labels(images):
    run_page(images, "label_free")
    assert len(read_run(images, "label_free/student")["teachers"]) == 1
    names = load_file(images.folder / "runs/label_free/student/student.safetensors").keys()
    assert names and not any(name.startswith("head.") for name in names)
    with (images.folder / "features.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 48 and math.isfinite(float(rows[0]["feature_47"]))


def test_a_model_of_text_writes(workplace):
    run_page(workplace, "text")
    assert 0 < read_run(workplace, "example_text/first")["final"]["eval_bits_per_byte"] < 10
    written = next(done for command, done in workplace.done.items() if "generate" in command)
    assert written.output.startswith("A run ")


def test_the_program_in_the_readme_makes_steps(digits):
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    done = start([sys.executable, "-c", program], digits.folder)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert [int(line.split()[0]) for line in lines] == list(range(1, 21))
    assert "'loss/total': " in lines[-1]
