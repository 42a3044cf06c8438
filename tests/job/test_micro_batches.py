"""`train.accumulate_steps: auto`: verdicts for the chip are used, logged, or refused."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from job import build
from job.check import check
from job.micro_batches import (
    check_automatic_parts,
    choose_parts,
    compute_step_hash,
    get_examples_per_chip,
    resolve_micro_batches,
)
from main import main
from store.quality.calibration import hash_step
from tests.support.child_runs import read_losses
from tests.support.tiny_parts import VIT_ARGS, create_argv, create_config, create_cpu_runtime
from utils.config.load import RunConfig, change, load_config
from utils.errors import UserError
from utils.runtime import peaks

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
ENTRY = "{{parts: {}, step: {}, graph: 0123abcd}}"
AUTO = "--train.accumulate_steps=auto"


def create(folder: Path, *flags: str, parts: int = 4) -> RunConfig:
    """A configuration with a verdict on its own step of 64 examples on a v5e chip."""
    step = compute_step_hash(create_config(folder, *flags))
    entry = ENTRY.format(parts, step)
    return create_config(folder, *flags, AUTO, f"--train.verdicts={{'v5e:64': {entry}}}")


def test_the_verdict_for_the_chip_decides_and_gives_its_reason(tmp_path):
    config = create(tmp_path)
    step = compute_step_hash(config)
    parts, reason = choose_parts(config, step, "v5e", 64)
    assert parts == 4
    assert reason == (
        "by the compiler's verdict 64 examples a v5e cost least 16 at a time (graph 0123abcd)"
    )
    assert choose_parts(config, step, "", 8) == (1, "there is no TPU here")


def test_the_hash_covers_the_step_and_not_its_split(tmp_path):
    plain = create_config(tmp_path)
    same = create_config(tmp_path, "--train.accumulate_steps=8", "--optim.lr=0.5", "--train.seed=3")
    assert (
        compute_step_hash(plain) == compute_step_hash(same) == compute_step_hash(create(tmp_path))
    )
    told = create(tmp_path)
    without = change(told, train={"verdicts": {}})
    assert hash_step(told.model_dump()) == hash_step(without.model_dump())
    other = create_config(tmp_path, "--optim.name=sgd")
    assert compute_step_hash(other) != compute_step_hash(plain)


@pytest.mark.parametrize(
    ("chip", "examples", "words"),
    [
        ("v5e", 32, r"no verdict for v5e:32 in train.verdicts \(v5e:64\); run python -m tools"),
        (
            "v6e",
            64,
            r"no verdict for v6e:64 .* --target v6e:1x1 --batch 64 --micro-batches --write",
        ),
    ],
)
def test_a_step_without_a_verdict_is_refused_with_the_command(chip, examples, words, tmp_path):
    config = create(tmp_path)
    with pytest.raises(UserError, match=words):
        choose_parts(config, compute_step_hash(config), chip, examples)


def test_a_verdict_on_another_step_is_refused(tmp_path):
    config = create(tmp_path)
    with pytest.raises(UserError, match=r"train.verdicts.v5e:64 is of another step"):
        choose_parts(config, "another", "v5e", 64)


def test_steps_that_no_verdict_can_split_are_refused_before_a_device_is_touched(tmp_path):
    config = create(tmp_path)
    student = nn.Linear(3, 3)
    with pytest.raises(UserError, match=r"has no verdict for v6e:IMAGES"):
        check_automatic_parts(config, student, "v6e")
    check_automatic_parts(config, student, "v5e")
    check_automatic_parts(config, student, "")
    with pytest.raises(UserError, match=r"\(auto\) is not supported with the BatchNorm"):
        check_automatic_parts(config, nn.Sequential(nn.BatchNorm2d(3)), "")


@pytest.mark.parametrize("name", ["v7:64", "v5e", "v5e:0", "cpu:8", "v3:64"])
def test_an_invalid_verdict_name_is_refused(name):
    flag = f"--train.verdicts={{'{name}': {ENTRY.format(1, 'a')}}}"
    with pytest.raises(UserError, match=r"train\.verdicts"):
        load_config([flag])


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "aut", "true"])
def test_accumulate_steps_is_at_least_one_or_auto(value):
    words = r"train.accumulate_steps \(.*\): it must be a whole number of at least 1, or auto"
    with pytest.raises(UserError, match=words):
        load_config([f"--train.accumulate_steps={value}"])


def test_a_chip_of_two_cores_holds_the_examples_of_both():
    assert [get_examples_per_chip(name, 32) for name in ("v4", "v5e")] == [64, 32]


def test_a_run_resolves_auto_by_the_verdict_for_its_chip(tmp_path, caplog, monkeypatch):
    """The number reaches the job's configuration; the host's PCI devices identify the chip."""
    job = check(create(tmp_path), "cpu")
    assert job.config.train.accumulate_steps == "auto"
    job = replace(job, config=create(tmp_path, f"--data.global_batch_size={2 * 64}"))
    with caplog.at_level(logging.INFO):
        settled = resolve_micro_batches(job, "v5e", 2)
    assert settled.config.train.accumulate_steps == 4
    assert "train.accumulate_steps (auto) is 4: by the compiler's verdict" in caplog.text
    assert resolve_micro_batches(job, "", 2).config.train.accumulate_steps == 1
    assert resolve_micro_batches(settled, "v6e", 2) is settled
    device = tmp_path / "0000:00:05.0"
    device.mkdir()
    (device / "vendor").write_text("0x1ae0\n")
    (device / "device").write_text("0x0063\n")
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    monkeypatch.setattr(
        peaks, "name_hardware", lambda name, found=peaks.name_hardware: found(name, tmp_path)
    )
    assert peaks.name_planned_chip("xla") == "v5e"


def test_a_runs_parts_are_built_with_the_verdict_for_its_chip(tmp_path, monkeypatch):
    name = "v5e:16"
    step = compute_step_hash(create_config(tmp_path))
    flag = f"--train.verdicts={{'{name}': {ENTRY.format(2, step)}}}"
    job = check(create_config(tmp_path, AUTO, flag), "cpu")
    for chip, parts in (("v5e", 2), ("", 1)):
        monkeypatch.setattr(build, "name_chip_of", lambda runtime, chip=chip: chip)
        built = build.build_parts(create_cpu_runtime(), job)
        built.close()
        assert built.plan.accumulate_steps == parts


def test_main_follows_the_verdict_and_logs_it(tmp_path, monkeypatch, capfd):
    """Dropout is drawn for each micro-batch, so that losses tell how many there were."""
    args = json.dumps({**VIT_ARGS, "proj_drop_rate": 0.5})
    flags = (f"--model.args={args}", "--train.steps=2")
    step = compute_step_hash(create_config(tmp_path, *flags))
    verdict = f"--train.verdicts={{'v5e:16': {ENTRY.format(4, step)}}}"
    losses, said = {}, {}
    for name, chip, value in (
        ("four", "CPU", "4"),
        ("told", "TPU v5e", "auto"),
        ("alone", "CPU", "auto"),
    ):
        monkeypatch.setattr(peaks, "name_hardware", lambda found, chip=chip: chip)
        own = (verdict, f"--train.accumulate_steps={value}", f"--run.run_id={name}")
        assert main(create_argv(tmp_path, *flags, *own)) == 0
        losses[name], said[name] = read_losses(tmp_path / "tiny" / name), capfd.readouterr().err
    assert losses["told"] == losses["four"] != losses["alone"]
    words = "(auto) is 4: by the compiler's verdict 16 examples a v5e cost least 4 at a time"
    assert words in said["told"] and words not in said["four"]
    assert "(auto) is 1: there is no TPU here" in said["alone"]


def test_verdicts_in_configurations_match_their_steps():
    """After a change of a recipe's step, find a new verdict; its examples must divide the batch."""
    files = sorted(one for one in CONFIGS.rglob("*.yaml") if "  verdicts:" in one.read_text())
    assert [one.name for one in files] == ["vit_s16_90ep.yaml"]
    for file in files:
        config = load_config(["--config", str(file), AUTO])
        step = compute_step_hash(config)
        for name in config.train.verdicts:
            chip, _, examples = name.partition(":")
            parts, reason = choose_parts(config, step, chip, int(examples))
            assert parts >= 1 and reason.startswith("by the compiler's verdict")
            assert config.data.global_batch_size % int(examples) == 0
