"""Runs own their directory exclusively, and nothing else is ever removed."""

from __future__ import annotations

import json
import resource
import subprocess
from pathlib import Path
from pkgutil import resolve_name

import pytest

import main as program
from job import replica
from job.check import check
from store.record.history import read_metrics
from tests.support.tiny_parts import SYNTHETIC, create_cpu_runtime
from utils.config.load import load_config
from utils.errors import UserError

FLAGS = (
    *SYNTHETIC,
    "--config=configs/smoke.yaml",
    "--runtime.device=cpu",
    "--train.steps=4",
    "--train.checkpoint_every_steps=2",
    "--run.run_id=a",
)


def run(output: Path, *flags: str) -> int:
    return program.main([*FLAGS, f"--run.output_dir={output}", *flags])


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run store with one run of 4 steps."""
    output = tmp_path_factory.mktemp("finished")
    assert run(output) == 0
    return output


def test_of_two_programs_that_found_a_directory_free_the_later_is_refused(tmp_path):
    job = check(load_config([*FLAGS, f"--run.output_dir={tmp_path}"]))
    # The other one begins and ends between this one's look and its lock.
    assert run(tmp_path) == 0
    folder = tmp_path / "tiny" / "a"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"run.run_id: .*a exists; choose another run.run_id"):
        replica.run(create_cpu_runtime(), job)
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


def test_a_run_resumes_from_a_checkpoint_newer_than_the_checked_one(tmp_path, capsys):
    flags = [*FLAGS, f"--run.output_dir={tmp_path}", "--train.steps=2", "--run.resume=auto"]
    assert program.main(flags) == 0
    job = check(load_config([*flags, "--train.steps=6"]))
    assert str(job.checkpoint).endswith("step_00000002")
    assert program.main([*flags, "--train.steps=4"]) == 0
    assert replica.run(create_cpu_runtime(), job) == 0
    said = capsys.readouterr().err
    assert "step_00000004 at step 4" in said and "set aside" not in said


@pytest.mark.parametrize("run_id", ["../../precious", ".", "..", "/tmp/x", "a b"])
def test_a_path_as_a_run_name_is_refused_even_with_overwrite(tmp_path, capsys, run_id):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("years of work")
    for key in ("run.run_id", "run.experiment"):
        assert run(tmp_path / "runs", f"--{key}={run_id}", "--run.overwrite=true") == 2
        assert f"{key} ({run_id!r}) is not a valid name" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_overwrite_keeps_directories_that_are_no_runs(tmp_path, capsys):
    (tmp_path / "tiny" / "a").mkdir(parents=True)
    (tmp_path / "tiny" / "a" / "thesis.tex").write_text("years of work")
    assert run(tmp_path, "--run.overwrite=true") == 2
    assert "contains no run.json of this program" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "tiny" / "a").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("place", ["tiny", "tiny/a"])
def test_a_file_in_place_of_a_run_is_refused_by_the_check(tmp_path, capsys, place):
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text("mine")
    assert run(tmp_path, "--check") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"the run would be in {tmp_path}/tiny/a, but {tmp_path / place} is a file" in line


def test_a_replaced_run_is_deleted_only_after_the_new_ones_checkpoint(finished, monkeypatch):
    experiment = finished / "tiny"
    first = json.loads((experiment / "a" / "run.json").read_text())
    weights = (experiment / "a" / "student.safetensors").read_bytes()

    def fail(*arguments: object) -> None:
        raise RuntimeError("a part cannot be built")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="a part"):
        patch.setattr("job.replica.build_parts", fail)
        run(finished, "--run.overwrite=true")
    assert (experiment / "aside_a" / "student.safetensors").read_bytes() == weights
    # The place is free again, and what was set aside is no run of its own.
    assert run(finished) == 0
    second = json.loads((experiment / "a" / "run.json").read_text())
    assert second["id"] > first["id"]
    assert run(finished, "--run.overwrite=true") == 0
    assert json.loads((experiment / "a" / "run.json").read_text())["id"] > second["id"]
    assert sorted(path.name for path in experiment.iterdir()) == ["a", "aside_a"]


def test_time_and_graphs_add_up_over_attempts_named_in_each_line(tmp_path):
    assert run(tmp_path, "--train.steps=3", "--train.checkpoint_every_steps=3") == 0
    assert run(tmp_path, "--train.steps=6", "--run.resume=auto") == 0
    lines = [line for line in read_metrics(tmp_path / "tiny" / "a") if line["kind"] == "train"]
    assert [line["attempt"] for line in lines] == [1, 1, 1, 2, 2, 2]
    times = [line["time_s"] for line in lines]
    assert times == sorted(times) and times[3] > times[2] > 0
    facts = json.loads((tmp_path / "tiny" / "a" / "run.json").read_text())
    assert (facts["attempts"], facts["final_up_to_step"], facts["status"]) == (2, 6, "complete")


def test_tensorboard_matches_the_metrics_after_resuming(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = ("--run.tensorboard=true", "--train.checkpoint_every_steps=3")
    assert run(tmp_path, *flags, "--train.steps=3") == 0
    assert run(tmp_path, *flags, "--train.steps=6", "--run.resume=auto") == 0
    events = EventAccumulator(str(tmp_path / "tiny" / "a"))
    events.Reload()
    lines = [line for line in read_metrics(tmp_path / "tiny" / "a") if line["kind"] == "train"]
    shown = [(event.step, event.value) for event in events.Scalars("train/loss/total")]
    assert shown == [(x["step"], pytest.approx(x["loss/total"], rel=1e-6)) for x in lines]
    assert [event.step for event in events.Scalars("eval/top1")] == [6]


def make_file(folder: Path) -> Path:
    (folder / "a_file").write_text("")
    return folder / "a_file" / "runs"


def mount_disk(folder: Path, kib: int) -> Path:
    """A disk of its own of that size."""
    disk = folder / "disk"
    disk.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(disk)], check=False
    )
    if done.returncode:
        pytest.skip("no right to mount a disk")
    return disk


def make_full(folder: Path) -> Path:
    """A disk of its own, too small for anything."""
    disk = mount_disk(folder, 4)
    (disk / "full").write_bytes(b"x" * 4096)
    return disk


@pytest.mark.parametrize(
    "moment",
    [
        "store.record.lock.describe_self",
        "store.record.runs.Run.write_config",
        "store.record.session.begin_attempt",
        "store.record.session.write_environment",
    ],
)
def test_a_disk_full_at_the_start_is_refused_without_leftovers(
    tmp_path, monkeypatch, capsys, moment
):
    limits, original = resource.getrlimit(resource.RLIMIT_FSIZE), resolve_name(moment)

    def fill(*args, **kwargs):
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        return original(*args, **kwargs)

    monkeypatch.setattr(moment, fill)
    try:
        assert run(tmp_path) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert f"error: run.output_dir ('{tmp_path}') cannot be written to: File too large; " in said
    assert not {one.name for one in tmp_path.glob("tiny/a/*")} - {"run.lock"}
    monkeypatch.undo()
    assert run(tmp_path, "--train.steps=2") == 0


@pytest.mark.parametrize(("kib", "code"), [(8, 2), (16, 2), (40, 1), (256, 1)])
def test_a_disk_that_fills_up_at_any_time_gives_one_line(tmp_path, capsys, kib, code):
    """Before the first facts stand whole the place is refused; later the run is stopped."""
    disk = mount_disk(tmp_path, kib)
    try:
        assert run(disk, "--runtime.num_threads=1") == code
        kept = list(disk.iterdir())
    finally:
        subprocess.run(["umount", str(disk)], check=False)
    said = capsys.readouterr().err
    start = {1: "the run was stopped: ", 2: f"error: run.output_dir ('{disk}') cannot be written"}
    assert said.splitlines()[-1].startswith(start[code])
    assert "No space left on device" in said.splitlines()[-1] and "Traceback" not in said
    assert bool(kept) is (code == 1)


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (make_file, "is a file"),
        (lambda folder: Path("/proc/runs"), "No such file or directory"),
        (make_full, "No space left on device"),
    ],
)
def test_an_unwritable_directory_is_refused_before_a_device_is_touched(
    tmp_path, capsys, monkeypatch, place, reason
):
    monkeypatch.setattr("job.entry.launch", None)
    output = place(tmp_path)
    try:
        assert run(output) == 2
    finally:
        subprocess.run(["umount", str(tmp_path / "disk")], check=False, capture_output=True)
    line = capsys.readouterr().err.strip().split("\n")[-1]
    assert line.startswith(f"error: run.output_dir ('{output}') cannot be written to: ")
    assert reason in line
