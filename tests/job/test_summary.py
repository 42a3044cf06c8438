"""Summaries of a run: with --check, in its first lines and in its last ones."""

from __future__ import annotations

import json
import re

import pytest

import main
from job.summary import describe_end
from tests.support.tiny_parts import create_argv


def read_log(capsys) -> list[str]:
    """The log's lines without their time."""
    found = re.findall(r"^\d\d:\d\d:\d\d (.*)$", capsys.readouterr().err, re.MULTILINE)
    assert found
    return found


def check(capsys, tmp_path, *flags, device="cpu") -> list[str]:
    assert main.main(create_argv(tmp_path / "runs", "--check", *flags, device=device)) == 0
    assert not (tmp_path / "runs").exists()
    return capsys.readouterr().out.splitlines()


def test_check_prints_what_would_run_and_writes_nothing(capsys, tmp_path):
    told = check(capsys, tmp_path, "--epochs=2", "--run.run_id=a", "--runtime.precision=bf16")
    bill = told.pop(-2)
    assert bill.startswith("bill: cheapest: v") and bill.endswith("python -m tools.plan has all")
    assert "USD " in bill and " h (bound " in bill and "counted FLOPs" in bill
    assert told == [
        "device: cpu; 1 rank, bf16",
        "model: vit_tiny_patch16_224, 3,850 parameters, 10 classes, images of 8 x 8 x 1",
        "data: synthetic, 96 examples to train on, 96 to evaluate; 12 steps of 16, 2 epochs",
        f"directory: {tmp_path}/runs/tiny/a",
        "all checks passed; no device was used and nothing was written",
    ]


@pytest.mark.xla
@pytest.mark.parametrize(
    ("pjrt", "words"),
    [
        ("CPU", "device: xla on the CPU, no TPU is used; 1 rank, fp32"),
        (None, "device: xla on the CPU, no TPU is used; 1 rank, fp32"),
        ("TPU", "device: xla on TPU; as many ranks as there are devices, fp32"),
    ],
)
def test_the_summary_names_the_hardware_behind_xla(capsys, tmp_path, monkeypatch, pjrt, words):
    monkeypatch.delenv("PJRT_DEVICE")
    if pjrt:
        monkeypatch.setenv("PJRT_DEVICE", pjrt)
    monkeypatch.setattr("utils.runtime.xla.start.has_tpu", lambda: pjrt == "TPU")
    assert check(capsys, tmp_path, device="xla")[0] == words


def test_check_counts_processes_and_names_the_teacher(capsys, tmp_path):
    flags = ("--kd=kd", "--teacher=ema", "--model_ema", "--runtime.num_processes=2")
    told = check(capsys, tmp_path, *flags)
    assert told[0] == "device: cpu; 2 ranks, fp32"
    assert told[1].endswith("; kd from ema")


def test_check_refuses_what_a_run_would_refuse(capsys, tmp_path):
    flags = create_argv(tmp_path / "runs", "--check", "--model.image_size=7")
    assert main.main(flags) == 2
    assert "model.image_size (now 7)" in capsys.readouterr().err


def test_a_run_logs_a_summary_at_its_start_and_end(tmp_path, capsys):
    place = tmp_path / "tiny" / "a"
    assert main.main(create_argv(tmp_path, "--train.epochs=2", "--run.run_id=a")) == 0
    lines = read_log(capsys)
    heads = (
        "device: cpu; 1 rank",
        "model: vit_tiny_patch16_224, 3,850 parameters",
        "data: synthetic, 96 examples",
        f"directory: {place}",
    )
    for line, head in zip(lines, heads, strict=False):
        assert line.startswith(head)
    best = json.loads((place / "checkpoints" / "best.json").read_text())["step"]
    assert f" at step {best}; at the end, step 12, " in lines[-3]
    assert lines[-3].startswith("best top-1 ")
    assert lines[-2].startswith(f"checkpoints in {place}/checkpoints, ")
    assert lines[-1] == f"complete: {place}"


def test_evaluations_and_resumed_runs_log_where_they_start(tmp_path, capsys):
    first = create_argv(tmp_path, "--train.steps=6", "--run.run_id=a")
    assert main.main(first) == 0
    place = tmp_path / "tiny" / "a"
    for flags in (("--eval", "--resume=auto"), ("--resume=auto",)):
        capsys.readouterr()
        assert main.main([*first, *flags, "--train.steps=7"]) == 0
        told = f"directory: {place}; goes on from {place}/checkpoints/step_00000006"
        assert told in read_log(capsys)
        told = told.replace("06", "07") if "--eval" not in flags else told
        assert main.main([*first, *flags, "--train.steps=8", "--check"]) == 0
        assert told in capsys.readouterr().out.splitlines()


def test_without_an_evaluation_there_is_no_best(tmp_path):
    from types import SimpleNamespace

    from job.check import check as check_config
    from tests.support.tiny_parts import create_config

    job = check_config(create_config(tmp_path, "--run.run_id=a"))
    state = SimpleNamespace(best_score=None, step=3)
    assert [line.partition(" ")[0] for line in describe_end(job, "top-1", state, 0.0)] == [
        "checkpoints",
        "complete:",
    ]
