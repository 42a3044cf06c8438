"""Whole runs through main: the same on every runtime, continued bit for bit, loud when broken."""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file

import main
from engine import run_steps
from job.build import build_parts
from job.check import check
from job.stream import iterate_batches
from models.factory import export_model
from store.record.catalogue import KINDS, LOOP, METRICS
from store.record.history import get_numbers, keep_deterministic, read_metrics
from store.record.runs import Run
from tests.support.child_runs import ROOT, get_command, get_environment, run_main
from tests.support.tiny_parts import (
    CLASSES,
    DEVICE_CASES,
    RUNTIMES,
    VIT_ARGS,
    create_argv,
    create_config,
    create_vit,
)
from utils.config.load import load_config

STEPS_PER_EPOCH = 6
MIXED = ("--mixup=0.8", "--cutmix=1.0")
# What differs between two equal runs.


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory) -> Path:
    """An exported ViT with random weights, wider than the student."""
    folder = tmp_path_factory.mktemp("exported")
    args = {**VIT_ARGS, "embed_dim": 24, "img_size": 8}
    facts = {"model": "vit_tiny_patch16_224", "args": args, "num_classes": CLASSES}
    export_model(create_vit(seed=7, embed_dim=24).state_dict(), facts, folder)
    return folder


def get_distill_flags(teacher_folder: Path) -> tuple[str, ...]:
    return (
        "--kd=kd",
        f"--teacher_path={teacher_folder}",
        "--kd_temperature=2",
        "--kd_alpha=0.5",
        "--distill.allow_weak_teacher=true",
    )


def build(output_dir: Path, *flags: str, device: str = "cpu"):
    """Runtime, job and parts of a synthetic run, ready for its first step."""
    config = create_config(output_dir, *flags, device=device)
    job, runtime = check(config), RUNTIMES[device]()
    parts = build_parts(runtime, job)
    runtime.finish_step()
    return runtime, job, parts


def take_steps(runtime, job, parts, count: int) -> list[int]:
    """Run steps; return the graphs compiled after each."""
    batches = itertools.islice(iterate_batches(parts, parts.state.step), count)
    steps = run_steps(parts.state, batches, parts.task, runtime, parts.plan)
    return [runtime.counters()["graphs"] for _ in steps]


def get_lines(folder: Path) -> list[dict]:
    """Return metrics without those of the clock and the compiler."""
    return [keep_deterministic(line) for line in read_metrics(folder)]


def get_training_lines(folder: Path) -> list[dict]:
    return [line for line in read_metrics(folder) if line["kind"] == "train"]


@pytest.mark.parametrize("device", DEVICE_CASES)
def test_a_teacher_is_unchanged_after_20_steps(tmp_path, device):
    """A teacher with BatchNorm and dropout: no gradient, no new weights, no new statistics."""
    torch.manual_seed(3)
    args = {"in_chans": 1, "drop_rate": 0.5}
    teacher = timm.create_model("test_efficientnet", num_classes=CLASSES, **args)
    facts = {"model": "test_efficientnet", "args": args, "num_classes": CLASSES}
    folder = tmp_path / "teacher"
    folder.mkdir()
    export_model(teacher.state_dict(), facts, folder)
    flags = (*get_distill_flags(folder), "--model_ema")
    steps = 20
    runtime, job, parts = build(tmp_path, *flags, device=device)
    (taught,) = parts.task.teachers
    start = parts.state.model.state_dict()
    start = {name: value.detach().cpu().clone() for name, value in start.items()}
    take_steps(runtime, job, parts, steps)
    for name, value in teacher.state_dict().items():
        assert torch.equal(value, taught.model.state_dict()[name].cpu()), name
    assert not any(module.training for module in taught.modules())
    taught.train()
    assert not any(module.training for module in taught.modules())
    assert not any(p.requires_grad or p.grad is not None for p in taught.parameters())
    state = parts.state
    owned = {id(p) for p in state.parameters()} | {id(p) for p in state.ema.parameters()}
    owned |= {id(p) for group in state.optimizer.param_groups for p in group["params"]}
    assert not owned & {id(p) for p in taught.parameters()}
    names = (
        set(state.model.state_dict())
        | set(state.ema.state_dict())
        | set(state.loss_modules.state_dict())
    )
    assert names == set(start)
    moved = {n: not torch.equal(v.cpu(), start[n]) for n, v in state.model.state_dict().items()}
    assert moved["head.weight"]


def test_a_weak_teacher_is_refused_unless_allowed(tmp_path, teacher_folder, capsys):
    flags = [f for f in get_distill_flags(teacher_folder) if "allow_weak" not in f]
    assert main.main(create_argv(tmp_path / "runs", *flags, "--train.steps=2")) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: distill.teacher ") and " has top-1" in last
    assert "no better than chance" in last
    assert "distill.allow_weak_teacher" in last
    assert not (tmp_path / "runs").exists()


@pytest.mark.xla
def test_mixup_and_cutmix_compile_nothing_over_50_steps(tmp_path):
    flags = (*MIXED, "--model_ema", "--drop_path=0.1", "--train.mix_prob=0.7", "--train.steps=52")
    runtime, job, parts = build(tmp_path, *flags, device="xla")
    before = runtime.counters()
    graphs = take_steps(runtime, job, parts, 52)
    assert graphs[-1] == graphs[1]
    assert graphs[-1] - before["graphs"] <= 2
    after = runtime.counters()
    assert after["host_reads"] == before["host_reads"]
    assert after["host_ops"] == before["host_ops"]


@pytest.mark.xla
@pytest.mark.slow
def test_200_steps_under_xla_compile_two_train_graphs_and_read_nothing(
    tmp_path, digits_root, teacher_run
):
    """The distilled run of the demo, through the command line, as its metrics tell it."""
    done = run_main(
        [
            "--config",
            "configs/digits_kd.yaml",
            f"--data.root={digits_root}",
            *MIXED,
            f"--run.output_dir={tmp_path}",
            "--run.run_id=long",
            f"--teacher_path={teacher_run}",
            "--train.steps=200",
            "--train.log_every_steps=20",
            "--train.eval_every_epochs=5",
            "--runtime.device=xla",
            "--model_ema",
            "--model_ema_decay=0.9",
        ]
    )
    assert done.returncode == 0, done.stderr
    assert "oneDNN" not in done.stderr and "absl" not in done.stderr
    folder = tmp_path / "digits_kd" / "long"
    lines = get_training_lines(folder)
    assert [line["step"] for line in lines] == list(range(20, 201, 20))
    assert {line["host_reads"] for line in lines} == {0}
    last = read_metrics(folder)[-1]
    assert 1 <= last["graphs_train"] <= 2
    assert last["graphs_eval"] <= 1
    assert last["graphs"] <= 8
    assert lines[0]["graphs_train"] == last["graphs_train"]
    assert {"loss/task", "loss/kd", "loss/total"} <= lines[0].keys()
    facts = Run(folder).read()
    assert facts["status"] == "complete"
    assert facts["environment"]["runtime"] == "xla"
    assert facts["final"]["test_examples"] == 300
    assert facts["final"]["eval_top1"] > 30
    assert facts["teachers"][0]["top1"] > 20


@pytest.mark.xla
def test_xla_and_cpu_agree_on_six_distillation_steps(tmp_path, teacher_folder):
    flags = (
        *get_distill_flags(teacher_folder),
        *MIXED,
        "--train.steps=6",
        "--model_ema",
        "--model_ema_decay=0.5",
        "--clip_grad=1.0",
        "--update_freq=2",
        "--smoothing=0.1",
    )
    for device in RUNTIMES:
        assert (
            main.main(create_argv(tmp_path, *flags, f"--run.run_id={device}", device=device)) == 0
        )
    cpu, xla = (get_lines(tmp_path / "tiny" / device) for device in ("cpu", "xla"))
    assert len(cpu) == len(xla) == 7
    for ours, theirs in zip(cpu, xla, strict=True):
        assert ours.keys() == theirs.keys()
        assert ours["kind"] == theirs["kind"]
        for name in ours.keys() - {"kind", "host_reads"}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-9), name
    weights = [load_file(tmp_path / "tiny" / d / "student.safetensors") for d in ("cpu", "xla")]
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=1e-3, atol=2e-5, msg=name)


def test_four_micro_batches_give_the_gradients_of_the_undivided_batch(tmp_path, teacher_folder):
    """Distillation with mixed pairs and smoothing: one SGD step from the same weights."""
    flags = (
        *get_distill_flags(teacher_folder),
        *MIXED,
        "--smoothing=0.1",
        "--opt=momentum",
        "--lr=1",
        "--optim.momentum=0",
        "--weight_decay=0",
        "--optim.schedule=constant",
    )
    changes = []
    for parts_count in (1, 4):
        run = build(tmp_path, *flags, f"--update_freq={parts_count}")
        model = run[2].state.model
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        take_steps(*run, 1)
        changes.append({n: p.detach() - start[n] for n, p in model.named_parameters()})
    for name, change in changes[0].items():
        # Every change is a difference of float32 weights, and rounded as they are.
        floor = 1e-6 * change.numel() ** 0.5
        assert float((change - changes[1][name]).norm()) <= 1e-5 * float(change.norm()) + floor
    assert max(float(change.norm()) for change in changes[0].values()) > 1e-2


# Numbers of devices that have them: of chips, and of the stand-in of a TPU.
NOT_HERE = {"mfu", "hbm_peak_gib", "duty_cycle", "executions"}


def test_the_seed_decides_a_run(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        flags = (f"--seed={seed}", f"--run.run_id={name}", "--train.steps=3", *MIXED)
        assert main.main(create_argv(tmp_path, *flags)) == 0
    a, b, c = (get_lines(tmp_path / "tiny" / name) for name in "abc")
    assert a == b
    assert a != c


def test_a_run_directory_holds_the_complete_record(teacher_run, digits_root):
    config = load_config(["--config", str(teacher_run / "config_resolved.yaml")])
    assert config.data.root == str(digits_root)
    assert config.train.epochs == 6
    facts = Run(teacher_run).read()
    assert facts["status"] == "complete"
    assert facts["ended"] > facts["started"]
    for name in ("started", "ended"):
        told = datetime.strptime(facts[f"{name}_utc"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
        assert 0 <= facts[name] - told.timestamp() < 1
    assert {"python", "packages", "git_commit", "host", "device", "runtime"} <= facts[
        "environment"
    ].keys()
    assert {"test_top1", "eval_top1", "train_s", "steps", "graphs", "parameters"} <= facts[
        "final"
    ].keys()
    assert facts["final"]["parameters"] == sum(
        value.numel() for value in load_file(teacher_run / "student.safetensors").values()
    )
    line = get_training_lines(teacher_run)[0]
    assert {
        "step",
        "kind",
        "epoch",
        "time_s",
        "loss/task",
        "loss/total",
        "lr",
        "grad_norm",
        "img_per_s",
        "graphs",
        "host_reads",
        "input_wait_s",
        "host_rss_gib",
    } <= line.keys()
    numbers = {name for line in read_metrics(teacher_run, KINDS) for name in get_numbers(line)}
    entries = {name: METRICS.find(name) for name in numbers}
    assert all(entries.values()), entries
    # No entry of the loop tells of what is not written; a CPU's peak is not known.
    written = {metric.name for metric in entries.values()}
    assert {metric.name for metric in LOOP} - NOT_HERE <= written
    names = {path.name.partition(".")[0] for path in teacher_run.iterdir()}
    assert {"checkpoints", "curves", "events", "student"} <= names
    assert [path.name for path in (teacher_run / "checkpoints").glob("step_*")]


def test_an_export_loads_into_plain_timm(teacher_run):
    facts = json.loads((teacher_run / "student.json").read_text())
    model = timm.create_model(facts["model"], num_classes=facts["num_classes"], **facts["args"])
    result = model.load_state_dict(load_file(teacher_run / "student.safetensors"), strict=True)
    assert not result.missing_keys
    logits = model.eval()(torch.zeros(2, 1, 8, 8))
    assert logits.shape == (2, 10)


def test_the_average_is_evaluated_and_exported(tmp_path):
    flags = ("--model_ema", "--model_ema_decay=0.5", "--train.steps=4", "--run.run_id=a")
    assert main.main(create_argv(tmp_path, *flags)) == 0
    folder = tmp_path / "tiny" / "a"
    exported = load_file(folder / "student.safetensors")
    average = load_file(folder / "checkpoints/step_00000004/ema.safetensors")
    student = load_file(folder / "checkpoints/step_00000004/model.safetensors")
    assert all(torch.equal(value, average[name]) for name, value in exported.items())
    assert not torch.equal(student["head.weight"], average["head.weight"])


@pytest.mark.parametrize("device", DEVICE_CASES)
def test_eval_reproduces_the_runs_metrics_and_writes_nothing(tmp_path, device, capsys):
    flags = create_argv(tmp_path, "--train.steps=4", "--run.run_id=a", "--model_ema", device=device)
    assert main.main(flags) == 0
    folder = tmp_path / "tiny" / "a"
    before = {path: path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*"))}
    capsys.readouterr()
    assert main.main([*flags, "--eval", "--resume=auto"]) == 0
    text = capsys.readouterr().err
    final = Run(folder).read()["final"]
    assert f"top-1 {final['eval_top1']:.2f}" in text
    assert f"loss {final['eval_loss']:.4f}" in text
    assert "96 examples" in text
    weights = folder / "student.safetensors"
    assert main.main([*flags, "--eval", f"--model.weights={weights}"]) == 0
    assert f"loss {final['eval_loss']:.4f}" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*"))} == before


def test_a_run_starts_from_the_weights_of_an_earlier_one(tmp_path):
    assert main.main(create_argv(tmp_path, "--train.steps=2", "--run.run_id=a")) == 0
    folder = tmp_path / "tiny" / "a"
    _, _, parts = build(tmp_path, f"--model.weights={folder}", "--seed=9")
    exported = load_file(folder / "student.safetensors")
    for name, value in parts.state.model.state_dict().items():
        assert torch.equal(value, exported[name])


def test_a_run_whose_loss_is_not_finite_fails_and_names_the_step(tmp_path, capsys):
    flags = (
        "--opt=momentum",
        "--lr=1e30",
        "--optim.min_lr=0",
        "--train.steps=12",
        "--run.run_id=a",
        "--train.log_every_steps=4",
        "--optim.schedule=constant",
    )
    assert main.main(create_argv(tmp_path, *flags)) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("the run was stopped: the loss or gradient of step ")
    facts = Run(tmp_path / "tiny" / "a").read()
    assert facts["status"] == "failed"
    assert "NonFiniteError" in facts["reason"]
    assert [line["step"] for line in read_metrics(tmp_path / "tiny" / "a")] == [4]
    assert not (tmp_path / "tiny" / "a" / "student.safetensors").exists()


@pytest.mark.xla
def test_a_run_over_its_graph_budget_fails_with_the_reason(tmp_path, capsys):
    flags = create_argv(
        tmp_path,
        "--train.steps=4",
        "--run.run_id=a",
        "--model.args=" + json.dumps({**VIT_ARGS, "embed_dim": 26}),
        device="xla",
    )
    assert main.main([*flags, "--runtime.graph_budget=1"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("the run was stopped: train of step 1 compiled graph ")
    assert "runtime.graph_budget (1)" in last
    assert Run(tmp_path / "tiny" / "a").read()["status"] == "failed"


def test_a_broken_loader_ends_the_run_with_its_cause(tmp_path, monkeypatch):
    def broken(*where):
        whole = iterate_batches(*where)
        yield next(whole)
        yield next(whole)
        raise OSError("the disk is gone")

    monkeypatch.setattr("job.callbacks.iterate_batches", broken)
    with pytest.raises(OSError, match="the disk is gone"):
        main.main(create_argv(tmp_path, "--train.steps=5", "--run.run_id=a"))
    facts = Run(tmp_path / "tiny" / "a").read()
    assert facts["status"] == "failed"
    assert facts["reason"] == "OSError: the disk is gone"


def test_an_interrupted_run_is_recorded_as_such_and_resumes(tmp_path):
    """Ctrl-C in mid-run: saved, code 75, no traceback; then `--resume auto` goes on from there."""
    flags = create_argv(
        tmp_path,
        "--train.steps=1000000",
        "--run.run_id=a",
        "--train.checkpoint_every_steps=5",
        "--train.log_every_steps=5",
        "--train.eval_every_epochs=100000",
    )
    process = subprocess.Popen(
        get_command(flags), cwd=ROOT, env=get_environment(), stderr=subprocess.PIPE, text=True
    )
    seen = []
    for line in process.stderr:
        seen.append(line)
        if "step 20/" in line:
            process.send_signal(signal.SIGINT)
            break
    seen += process.stderr.readlines()
    assert process.wait() == 75, "".join(seen)
    assert "Traceback" not in "".join(seen)
    assert re.search(r"preempted at step \d+; continue with --resume auto", seen[-1])
    folder = tmp_path / "tiny" / "a"
    assert Run(folder).read()["status"] == "preempted"
    step = max(int(path.name[5:]) for path in (folder / "checkpoints").glob("step_*"))
    assert step >= 15
    last = step - step % 5 + 10
    shorter = create_argv(tmp_path, f"--train.steps={last}", "--resume=auto")
    assert main.main(shorter) == 0
    assert Run(folder).read()["status"] == "complete"
    steps = [line["step"] for line in get_training_lines(folder)]
    assert sorted(set(steps)) == steps
    assert steps[-1] == last
