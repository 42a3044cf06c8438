"""Runs, checkpoints and caches that an earlier version has written still work, for ever.

tests/fixtures/old_runs was made by the program as it was before tasks had rooms of their own, and
each folder of tests/fixtures/releases by the version that it is named after: a run with an average
and mixing, one that a teacher taught, with a projection, and the teacher's stored answers.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import main
from models.teachers.teacher import hash_teacher
from proofs.release.fixture import CACHE, COMMON, RUNS, STORE, get_flags
from store.record.history import read_metrics
from tests.support.child_runs import ROOT
from tools.runs.__main__ import main as query_runs

OLD = ROOT / "tests" / "fixtures" / "old_runs"
FOLDERS = {path.name: path for path in (OLD, *sorted((ROOT / STORE).iterdir()))}


@pytest.fixture(params=FOLDERS)
def runs(request, tmp_path, monkeypatch) -> Path:
    """A copy of the old runs; the teacher is found from the root, as its run named it."""
    monkeypatch.chdir(ROOT)
    return Path(shutil.copytree(FOLDERS[request.param], tmp_path / request.param))


def find_flags(runs: Path, name: str) -> list[str]:
    teacher = FOLDERS[runs.name].relative_to(ROOT) / RUNS[0]
    return get_flags(name, teacher.as_posix())


def start(runs: Path, *flags: str) -> int:
    place = (f"--run.output_dir={runs.parent}", f"--run.experiment={runs.name}")
    return main.main([*place, *flags])


@pytest.mark.parametrize("name", FOLDERS)
def test_the_old_runs_are_small(name):
    assert sum(path.stat().st_size for path in FOLDERS[name].rglob("*")) < 450_000


def test_a_released_store_is_whole_and_is_listed(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store = str(ROOT / STORE)
    assert query_runs(["validate", "--strict", "--store", store]) == 0
    capsys.readouterr()
    assert query_runs(["list", "--json", "--filter", "status=complete", "--store", store]) == 0
    paths = {run["path"] for run in json.loads(capsys.readouterr().out)["runs"]}
    versions = {path.name for path in (ROOT / STORE).iterdir()}
    assert paths == {f"{version}/{name}" for version in versions for name in RUNS}


def test_the_version_of_the_project_has_its_folder():
    assert (ROOT / "VERSION").read_text(encoding="utf-8").strip() in FOLDERS


@pytest.mark.parametrize("name", RUNS)
def test_an_old_run_resumes(name, runs):
    before = load_file(runs / name / "student.safetensors")
    flags = (
        *find_flags(runs, name),
        f"--run.run_id={name}",
        "--run.resume=auto",
        "--train.steps=6",
    )
    assert start(runs, *flags) == 0
    lines = read_metrics(runs / name)
    trained = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in trained] == [1, 2, 3, 4, 5, 6]
    # What was written then and what is written now have the same form.
    assert trained[0].keys() == trained[-1].keys() >= {"loss/task", "loss/total"}
    judged = [line for line in lines if line["kind"] == "eval"]
    assert judged[0].keys() == judged[-1].keys() >= {"top1", "loss"}
    after = load_file(runs / name / "student.safetensors")
    assert before.keys() == after.keys()
    assert any(not torch.equal(value, after[key]) for key, value in before.items())
    facts = json.loads((runs / name / "run.json").read_text())
    assert (facts["status"], facts["attempts"], facts["final"]["steps"]) == ("complete", 2, 6)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("kind", ["checkpoint", "export"])
def test_an_old_run_evaluates_to_its_recorded_metrics(name, kind, runs, capsys):
    place = runs / name
    final = json.loads((place / "run.json").read_text())["final"]
    flags = [f"--run.resume={place / 'checkpoints' / 'step_00000004'}"]
    if kind == "export":
        flags = [f"--model.weights={place}"]
    args = next(flag for flag in find_flags(runs, name) if flag.startswith("--model.args"))
    assert start(runs, *COMMON, "--eval", args, *flags) == 0
    told = capsys.readouterr().err
    assert f"top-1 {final['eval_top1']:.2f}, top-5 {final['eval_top5']:.2f}" in told
    assert f"loss {final['eval_loss']:.4f}" in told


def test_old_teacher_caches_still_train(runs, monkeypatch):
    """The teacher's weights are read once, to see that the answers are its own."""
    hashed = []
    monkeypatch.setattr(
        "tasks.teachers.teaching.hash_teacher", lambda one: hashed.append(one) or hash_teacher(one)
    )
    cache = f"--distill.teacher_cache={runs / CACHE}"
    flags = (*find_flags(runs, CACHE), cache, "--run.run_id=new")
    assert start(runs, *flags) == 0
    assert json.loads((runs / "new" / "run.json").read_text())["status"] == "complete"
    assert len(hashed) == 1
