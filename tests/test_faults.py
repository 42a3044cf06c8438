"""Faults around a run: each has its outcome, and no valid file is damaged."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from safetensors.torch import load_file

import main
from datasets import Batch
from job.stream import iterate_batches
from store.query.record import RunRecord
from store.record.history import keep_deterministic, read_metrics
from store.record.hits import HITS_FILE, HitsFile, parse_hits
from store.record.lock import RunLock
from store.record.runs import Run
from store.record.session import RunSession
from tests.support.child_runs import ROOT, get_command, get_environment
from tests.support.tiny_parts import DEVICE_CASES, create_argv
from utils.checkpoint.files import load_checkpoint, verify_checkpoint
from utils.checkpoint.manager import CheckpointManager

SAVING = (
    "--mixup=0.8",
    "--model_ema",
    "--train.checkpoint_every_steps=2",
    "--train.steps=8",
    "--runtime.num_threads=1",
    "--train.eval_every_epochs=100",
    "--run.run_id=a",
)


def run(tmp_path: Path, *flags: str, device: str = "cpu") -> int:
    return main.main(create_argv(tmp_path, *SAVING, *flags, device=device))


def get_lines(folder: Path) -> list[dict]:
    return [keep_deterministic(line) for line in read_metrics(folder)]


def list_steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step_*"))


def get_error(capsys: pytest.CaptureFixture) -> str:
    return capsys.readouterr().err.splitlines()[-1]


def make_mixing_nan(batch: Batch) -> Batch:
    """Return the batch with mixing coefficients that are not numbers."""
    for value in batch.draws.values():
        if value.is_floating_point():
            value.fill_(float("nan"))
    return batch


@pytest.fixture
def poisoned(monkeypatch):
    """Make the batches of some steps give a NaN loss."""

    def poison(*steps: int) -> None:
        def spoilt(parts, first_step: int, *more) -> Iterator:
            batches = iterate_batches(parts, first_step, *more)
            for step, batch in enumerate(batches, start=first_step):
                yield make_mixing_nan(batch) if step in steps else batch

        monkeypatch.setattr("job.callbacks.iterate_batches", spoilt)

    return poison


@pytest.mark.parametrize("device", DEVICE_CASES)
def test_a_bad_batch_is_skipped_after_a_rollback(tmp_path, poisoned, device):
    """Step 5 is bad; the log point is step 8, so checkpoint 6 finds it: back to 4."""
    poisoned(5)
    flags = ("--train.on_nonfinite=rollback", "--train.log_every_steps=4")
    assert run(tmp_path, *flags, device=device) == 0
    folder = tmp_path / "tiny" / "a"
    facts = Run(folder).read()
    assert (facts["status"], facts["skipped_steps"]) == ("complete", [5])
    lines = [line for line in read_metrics(folder) if line["kind"] == "train"]
    assert [line["step"] for line in lines] == [4, 8]
    assert all(line["loss/total"] is not None for line in lines)
    parts, checkpoint = load_checkpoint(folder / "checkpoints" / "step_00000008")
    assert checkpoint.skipped_steps == (5,)
    assert all(torch.isfinite(v).all() for v in parts["model"].values())


def test_hits_of_a_rolled_back_evaluation_are_dropped(tmp_path, poisoned, monkeypatch):
    """Step 4 is bad and found at log point 8, behind the evaluation of step 6."""
    poisoned(4)
    path, dropped, drop = tmp_path / "tiny" / "a" / HITS_FILE, [], HitsFile.drop_later_than

    def watch(self: HitsFile, step: int) -> None:
        before = sorted(parse_hits(path.read_bytes())) if path.exists() else []
        drop(self, step)
        dropped.append((step, before, path.exists()))

    monkeypatch.setattr(HitsFile, "drop_later_than", watch)
    flags = (
        "--train.on_nonfinite=rollback",
        "--train.log_every_steps=8",
        "--train.eval_every_epochs=1",
        "--train.checkpoint_every_steps=8",
    )
    assert run(tmp_path, *flags) == 0
    # At the start, and where the run goes back: what is no number is no best evaluation.
    assert dropped == [(0, [], False), (0, ["last"], False)]
    lines = read_metrics(path.parent)
    top1 = {line["step"]: line["top1"] for line in lines if line["kind"] == "eval"}
    found = parse_hits(path.read_bytes())
    assert found["best"].step in top1 and found["last"].step == 8
    for one in found.values():
        assert 100.0 * one.count() * (1.0 / one.examples) == top1[one.step]


def test_a_resumed_run_skips_the_same_batch(tmp_path, poisoned, monkeypatch):
    """Killed between going back and the next checkpoint, which would tell of it."""
    poisoned(5)
    flags = ("--train.on_nonfinite=rollback", "--train.keep_checkpoints=9")
    assert run(tmp_path, *flags) == 0
    whole = tmp_path / "tiny" / "a"
    half = tmp_path / "half" / "tiny" / "a"
    shutil.copytree(whole, half)
    for step in (6, 8):
        shutil.rmtree(half / "checkpoints" / f"step_0000000{step}")
    monkeypatch.undo()  # the batch is good now: it is skipped all the same
    assert run(tmp_path / "half", *flags, "--resume=auto") == 0
    assert get_lines(half) == get_lines(whole)
    # The copied answers of step 8 were dropped with it, and came again to the bit.
    assert (half / HITS_FILE).read_bytes() == (whole / HITS_FILE).read_bytes()
    name = "checkpoints/step_00000008/state.json"
    tables = [json.loads((folder / name).read_text())["tensors"] for folder in (whole, half)]
    assert tables[0] == tables[1]
    skipped = [line for line in read_metrics(half) if line["step"] == 6]
    assert ["loss/total" in line for line in skipped] == [False]


def test_a_rollback_past_a_broken_checkpoint_rewrites_it(tmp_path, poisoned, monkeypatch):
    poisoned(5)
    note, broken = RunSession.note_checkpoint, []

    def note_and_break(self: RunSession, step: int) -> None:
        note(self, step)
        if step == 4 and not broken:
            folder = self.run.path / "checkpoints" / "step_00000004"
            flip_a_bit(folder)
            broken.append(folder)

    monkeypatch.setattr(RunSession, "note_checkpoint", note_and_break)
    assert run(tmp_path, "--train.on_nonfinite=rollback", "--train.keep_checkpoints=9") == 0
    folder = tmp_path / "tiny" / "a" / "checkpoints"
    assert verify_checkpoint(folder / "step_00000004").step == 4
    assert (folder / "aside_step_00000004").is_dir()
    assert [x["step"] for x in get_lines(folder.parent) if "lr" in x] == list(range(1, 9))


def test_a_run_with_too_many_rollbacks_ends(tmp_path, poisoned, capsys):
    poisoned(3, 5, 6)
    flags = ("--train.on_nonfinite=rollback", "--train.max_rollbacks=2")
    assert run(tmp_path, *flags) == 1
    assert "step 6 was not finite" in get_error(capsys)
    folder = tmp_path / "tiny" / "a"
    assert Run(folder).read()["status"] == "failed"
    assert Run(folder).read()["skipped_steps"] == [3, 5]
    for step in list_steps(folder):
        parts, _ = load_checkpoint(folder / "checkpoints" / f"step_{step:08d}")
        assert all(torch.isfinite(value).all() for value in parts["model"].values())


def test_a_bad_first_batch_rolls_back_to_the_start(tmp_path, poisoned):
    poisoned(0)
    assert run(tmp_path, "--train.on_nonfinite=rollback") == 0
    assert Run(tmp_path / "tiny" / "a").read()["skipped_steps"] == [0]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_resumed_low_precision_run_equals_an_uninterrupted_one(tmp_path, precision):
    """With float16 the loss's scale is part of the state."""
    flags = (f"--runtime.precision={precision}", "--train.keep_checkpoints=9", "--update_freq=2")
    assert run(tmp_path, *flags) == 0
    whole, half = tmp_path / "tiny" / "a", tmp_path / "half" / "tiny" / "a"
    shutil.copytree(whole, half)
    for step in (6, 8):
        shutil.rmtree(half / "checkpoints" / f"step_0000000{step}")
    assert run(tmp_path / "half", *flags, "--resume=auto") == 0
    assert get_lines(half) == get_lines(whole)
    facts = [load_checkpoint(x / "checkpoints" / "step_00000008")[1] for x in (whole, half)]
    assert facts[0].tensors == facts[1].tensors
    assert facts[0].scaler == facts[1].scaler
    assert (facts[0].scaler is not None) == (precision == "fp16")


def flip_a_bit(folder: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-9] ^= 16
    (folder / "model.safetensors").write_bytes(bytes(content))


def cut_a_file(folder: Path) -> None:
    path = folder / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", [flip_a_bit, cut_a_file])
def test_a_damaged_checkpoint_falls_back_to_an_older_one(tmp_path, damage, capsys):
    assert run(tmp_path) == 0
    folder = tmp_path / "tiny" / "a"
    lines, weights = get_lines(folder), load_file(folder / "student.safetensors")
    damage(folder / "checkpoints" / "step_00000008")
    assert run(tmp_path, "--resume=auto") == 0
    assert re.search("skipping a broken checkpoint: .*step_00000008", capsys.readouterr().err)
    assert get_lines(folder) == lines
    for name, value in load_file(folder / "student.safetensors").items():
        assert torch.equal(value, weights[name])
    verify_checkpoint(folder / "checkpoints" / "step_00000008")
    assert (folder / "checkpoints" / "aside_step_00000008").is_dir()


def test_a_named_checkpoint_that_is_broken_is_refused(tmp_path, capsys):
    assert run(tmp_path) == 0
    place = tmp_path / "tiny" / "a" / "checkpoints" / "step_00000008"
    flip_a_bit(place)
    assert run(tmp_path, f"--resume={place}") == 2
    assert re.search(r"error: run.resume: .*fails its checksum; choose another", get_error(capsys))
    assert Run(tmp_path / "tiny" / "a").read()["status"] == "complete"


def test_a_run_killed_in_its_first_write_starts_over(tmp_path):
    folder = tmp_path / "tiny" / "a"
    (folder / "checkpoints" / ".writing_step_00000002").mkdir(parents=True)
    (folder / "run.json").write_text('{"status": "running", "started": 1.0}')
    (folder / "metrics.jsonl").write_text('{"step": 1, "total": 9.0}\n{"step": 2, "to')
    assert run(tmp_path, "--resume=auto") == 0
    lines = [line for line in read_metrics(folder) if line["kind"] == "train"]
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert lines[0]["loss/total"] != 9.0
    assert not list((folder / "checkpoints").glob(".writing*"))


def test_resuming_from_an_older_checkpoint_moves_later_ones_aside(tmp_path):
    assert run(tmp_path, "--train.keep_checkpoints=9") == 0
    folder = tmp_path / "tiny" / "a"
    place = folder / "checkpoints" / "step_00000004"
    assert run(tmp_path, f"--resume={place}", "--train.steps=6") == 0
    assert list_steps(folder) == [4, 6]
    aside = sorted(path.name for path in (folder / "checkpoints").glob("aside_*"))
    assert aside == ["aside_step_00000006", "aside_step_00000008"]


def test_an_unwritable_checkpoint_ends_the_run_with_the_reason(tmp_path, monkeypatch, capsys):
    from utils.checkpoint import files

    original = files.save_file

    def full(tensors, path):
        if "step_00000006" in str(path):
            raise OSError(28, "No space left on device")
        original(tensors, path)

    monkeypatch.setattr(files, "save_file", full)
    assert run(tmp_path) == 1
    assert "No space left on device; earlier ones remain" in get_error(capsys)
    folder = tmp_path / "tiny" / "a"
    assert Run(folder).read()["status"] == "failed"
    assert list_steps(folder) == [2, 4]
    monkeypatch.undo()
    assert run(tmp_path, "--resume=auto") == 0
    assert list_steps(folder) == [6, 8]


@pytest.mark.parametrize(
    "moment", ["utils.checkpoint.files.save_file", "job.callbacks.RunCallbacks.begin_step"]
)
def test_a_full_disk_gives_one_reason(tmp_path, monkeypatch, capsys, moment):
    """The kernel refuses every write from then on, that of the run's end to run.json as well."""
    limits, calls = resource.getrlimit(resource.RLIMIT_FSIZE), []
    original = resolve_name(moment)

    def fill(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        return original(*args, **kwargs)

    monkeypatch.setattr(moment, fill)
    try:
        assert run(tmp_path) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert said.splitlines()[-1].startswith("the run was stopped: ")
    assert "File too large" in said.splitlines()[-1]
    monkeypatch.undo()
    assert run(tmp_path, "--resume=auto") == 0
    lines = [line for line in read_metrics(tmp_path / "tiny" / "a") if line["kind"] == "train"]
    assert [line["step"] for line in lines] == list(range(1, 9))


def test_a_run_whose_directory_is_removed_ends_with_that_reason(tmp_path, monkeypatch, capsys):
    def remove(*where) -> Iterator:
        for step, batch in enumerate(iterate_batches(*where)):
            if step == 5:
                shutil.rmtree(tmp_path / "tiny")
            yield batch

    monkeypatch.setattr("job.callbacks.iterate_batches", remove)
    assert run(tmp_path, "--train.checkpoint_every_steps=100") == 1
    assert "metrics.jsonl was deleted while the run was writing it" in get_error(capsys)


def test_a_changed_configuration_is_refused_with_the_difference(tmp_path, capsys):
    assert run(tmp_path) == 0
    assert run(tmp_path, "--resume=auto", "--lr=0.5", "--smoothing=0.1") == 2
    error = get_error(capsys)
    assert "optim.lr was 0.001, is 0.5; train.label_smoothing was 0.0, is 0.1" in error
    assert Run(tmp_path / "tiny" / "a").read()["status"] == "complete"
    flags = ("--resume=auto", "--lr=0.5", "--train.steps=10", "--run.allow_changes=optim.lr")
    assert run(tmp_path, *flags) == 0
    err = capsys.readouterr().err
    assert "changed since the checkpoint was written: optim.lr was 0.001, is 0.5" in err
    assert "changed since the checkpoint was written: train.steps was 8, is 10" in err


def test_another_thread_count_warns_and_is_refused_if_deterministic(tmp_path, capsys):
    assert run(tmp_path) == 0
    capsys.readouterr()
    more = ("--resume=auto", "--train.steps=9", "--runtime.num_threads=2")
    command = create_argv(tmp_path, *SAVING, *more, "--train.deterministic=true")
    done = subprocess.run(
        get_command(command), cwd=ROOT, env=get_environment(), capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "threads was 1, is 2" in done.stderr.splitlines()[-1]
    assert "train.deterministic: sums depend on the number of threads, here 2" in done.stderr
    assert run(tmp_path, *more) == 0
    assert (
        "bits may differ from those of an unbroken run: threads was 1, is 2"
        in capsys.readouterr().err
    )
    torch.set_num_threads(1)


def test_a_run_owned_by_another_program_is_refused_by_name(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("store.record.lock._WAIT_S", 0.0)
    monkeypatch.setattr("store.record.lock.refuse_if_owned.__defaults__", (0.0,))
    assert run(tmp_path) == 0
    lock = RunLock(tmp_path / "tiny" / "a")
    lock.acquire()
    try:
        assert run(tmp_path, "--resume=auto", "--train.steps=9") == 2
        assert f"is being written by process {os.getpid()} on " in get_error(capsys)
    finally:
        lock.release()
    assert run(tmp_path, "--resume=auto", "--train.steps=9") == 0


def test_a_run_may_start_from_another_runs_weights(tmp_path, capsys):
    assert run(tmp_path) == 0
    first = tmp_path / "tiny" / "a"
    flags = (
        "--run.run_id=b",
        f"--init-from={first}",
        "--train.steps=1",
        "--lr=1e-9",
        "--optim.min_lr=0",
        "--weight_decay=0",
    )
    assert run(tmp_path, *flags) == 0
    started = load_file(tmp_path / "tiny" / "b" / "student.safetensors")
    for name, value in load_file(first / "student.safetensors").items():
        torch.testing.assert_close(started[name], value, rtol=1e-5, atol=1e-6)
    assert re.search(r"(\d+) of \1 tensors start from", capsys.readouterr().err)
    fewer = (
        "--run.run_id=c",
        f"--init-from={first}",
        "--train.steps=1",
        "--model.args="
        + json.dumps({"patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 2}),
    )
    assert run(tmp_path, *fewer) == 2
    error = get_error(capsys)
    assert "12 missing: blocks.1.norm1.weight" in error
    assert run(tmp_path, *fewer, '--run.init_skip=["blocks.1.*"]') == 0
    assert re.search(r"(\d+) of (?!\1)\d+ tensors start from", capsys.readouterr().err)


def test_a_run_resumes_from_a_store_on_a_new_machine(tmp_path):
    """The run's own directory is lost with the machine; its checkpoints are not."""
    root = f"memory://{uuid.uuid4().hex}"
    flags = (f"--run.checkpoint_root={root}", "--train.keep_checkpoints=9")
    assert run(tmp_path / "one", *flags) == 0
    whole = tmp_path / "one" / "tiny" / "a"
    assert not (whole / "checkpoints").exists()
    manager = CheckpointManager(f"{root}/tiny/a")
    assert manager.list_steps() == [2, 4, 6, 8]
    for step in (6, 8):
        manager.folder.child(f"step_{step:08d}").remove()
    assert run(tmp_path / "two", *flags, "--resume=auto") == 0
    weights = load_file(whole / "student.safetensors")
    other = tmp_path / "two" / "tiny" / "a"
    for name, value in load_file(other / "student.safetensors").items():
        assert torch.equal(value, weights[name])
    assert get_lines(other) == get_lines(whole)


_STAND_STILL = """
import sys, threading, main, job.callbacks
from job.stream import iterate_batches
def stuck(*where):
    for step, batch in enumerate(iterate_batches(*where)):
        if step == 3:
            threading.Event().wait()
        yield batch
job.callbacks.iterate_batches = stuck
sys.exit(main.main(sys.argv[1:]))
"""


def test_a_hanging_loop_is_ended_and_names_its_span(tmp_path):
    flags = create_argv(tmp_path, *SAVING, "--train.stall_timeout_s=5")
    done = subprocess.run(
        [get_command([])[0], "-c", _STAND_STILL, *flags],
        cwd=ROOT,
        env=get_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 70, done.stderr
    assert "in stuck" in done.stderr
    wanted = "no step ended for 5 s (train.stall_timeout_s); the loop stands in 'input'"
    assert done.stderr.splitlines()[-1] == f"the run was stopped: {wanted}"
    facts = Run(tmp_path / "tiny" / "a").read()
    assert (facts["status"], facts["reason"]) == ("failed", wanted)
    assert list_steps(tmp_path / "tiny" / "a") == [2]
    last = RunRecord(tmp_path / "tiny" / "a").spans[-1]
    assert (last.name, last.duration_s) == ("stall", 5.0)
