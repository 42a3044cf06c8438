"""Teachers of a run are recorded at its start, with what was known of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import main
from job.check import check
from job.lineage import find_lineage
from store.lineage.ancestors import LINEAGE_FILE, fit_ancestors, format_note
from store.query.record import RunRecord
from tools.checkpoint import __main__ as checkpoint
from utils.config.load import load_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def flags(digits_root) -> list[str]:
    return [
        "--config",
        str(ROOT / "configs/digits_kd.yaml"),
        f"--data.root={digits_root}",
        "--runtime.device=cpu",
        "--train.epochs=3",
    ]


def find(flags, *more):
    return find_lineage(check(load_config([*flags, *more])), [{"top1": 50.0}])


def test_a_run_records_its_teacher_before_its_first_step(flags, teacher_run, tmp_path):
    """The run ends at once: what it recorded was recorded at its start."""
    own = [f"--teacher_path={teacher_run}", f"--run.output_dir={tmp_path}", "--run.run_id=taught"]
    assert main.main([*flags, *own, "--run.tensorboard=false"]) == 0
    (known,) = fit_ancestors(RunRecord(tmp_path / "digits_kd" / "taught").facts.lineage)
    teacher = RunRecord(teacher_run)
    assert (known.id, known.path) == (teacher.facts.id, "digits_student/taught")
    assert known.scores["test.top1"] == teacher.values["test.top1"]
    # The very split that the teacher's run was evaluated on.
    assert known.judged["top1"] == pytest.approx(teacher.values["eval.top1"])
    sums = {one["path"]: one["sha256"] for one in teacher.artifacts}
    assert known.weights == sums["student.safetensors"]


def test_checkpoints_files_and_copies_identify_their_run_or_checksum(flags, teacher_run, tmp_path):
    (step,) = (teacher_run / "checkpoints").glob("step_*")
    name = RunRecord(teacher_run).facts.id
    for place in (teacher_run / "student.safetensors", step):
        (known,) = find(flags, f"--teacher_path={place}")
        assert known.id == name and known.judged == {"top1": 50.0}
    for name in ("student.safetensors", "student.json"):
        shutil.copy(teacher_run / name, tmp_path)
    (lone,) = find(flags, f"--teacher_path={tmp_path / 'student.safetensors'}")
    (whole,) = find(flags, f"--teacher_path={teacher_run}")
    assert (lone.id, lone.weights, lone.hash) == ("", whole.weights, whole.hash)
    for suffix in (".safetensors", ".pth"):
        exported = tmp_path / f"elsewhere{suffix}"
        assert checkpoint.main(["export", str(teacher_run), "--out", str(exported)]) == 0
        (told,) = find(flags, f"--teacher_path={exported}")
        assert (told.id, told.path) == (RunRecord(teacher_run).facts.id, "")
    config = (teacher_run / "config_resolved.yaml").read_text()
    (tmp_path / "config_resolved.yaml").write_text(config)
    (tmp_path / "run.json").write_text("{")  # a damaged teacher ends no run
    (damaged,) = find(flags, f"--teacher_path={tmp_path / 'student.safetensors'}")
    assert (damaged.id, damaged.hash) == ("", whole.hash)


def test_two_teachers_are_recorded_but_not_the_runs_past_or_average(flags, teacher_run):
    two = json.dumps(
        [
            {"model": "past"},
            {"weights": str(teacher_run)},
            {"model": "ema"},
            {"weights": str(teacher_run), "weight": 2.0},
        ]
    )
    job = check(
        load_config(
            [*flags, f"--distill.teachers={two}", "--distill.ensemble=probs", "--train.ema=true"]
        )
    )
    found = find_lineage(job, [{"top1": 50.0}, {"top1": 40.0}])
    assert [(one.place, one.judged["top1"]) for one in found] == [
        (str(teacher_run), 50.0),
        (str(teacher_run), 40.0),
    ]
    assert find(["--config", flags[1].replace("_kd", "_student"), *flags[2:]]) == []


def test_a_teacher_cache_names_its_teacher_run(flags, teacher_run, tmp_path):
    job = check(load_config([*flags, f"--teacher_path={teacher_run}"]))
    (tmp_path / LINEAGE_FILE).write_text(format_note(find_lineage(job)))
    section = job.config.distill.model_copy(
        update={"teacher_weights": "", "teacher_cache": str(tmp_path)}
    )
    config = job.config.model_copy(update={"distill": section})
    (known,) = find_lineage(type(job)(**{**vars(job), "config": config}))
    assert (known.via, known.id) == ("cache", RunRecord(teacher_run).facts.id)
