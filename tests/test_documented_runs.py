"""Commands of the documents, run as they are printed, and where their files landed.

In the printed order, one working directory for all, so that a command finds what an earlier one has
made. Nothing is changed but flags at the end that shorten a run.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import shlex
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import load_file

from tests.support.documented_commands import (
    ROOT,
    get_call,
    list_documents,
    read_commands,
    start_script,
)
from tests.support.documented_launches import import_program, split_program
from tests.support.mnist_files import write_mnist
from utils.log import get_logger

COMMANDS = {
    path.relative_to(ROOT).as_posix(): read_commands(path.read_text(encoding="utf-8"))
    for path in list_documents()
}
RUN_HERE = (
    "README.md", "docs/data.md", "docs/checkpoints.md", "docs/distillation.md",
    "docs/first_hour.md",
)  # fmt: skip
# Native, in one thread: no time is lost where other programs use the cores.
_CPU = ("--runtime.device=cpu", "--runtime.num_threads=1")
# What a command starts with -> the flags that shorten it; the first that fits counts.
SHORTENED = {
    r"python main\.py --help$": (),
    r"python main\.py .*--train\.epochs=5\b": _CPU,
    r"python main\.py .*--eval\b": _CPU,
    r"python main\.py --config configs/digits_(?!.*gs://)": (*_CPU, "--train.epochs=3"),
    r"python main\.py --config configs/mnist\w*\.yaml .*--print-config$": (),
    r"python main\.py --config configs/mnist\.yaml ": (*_CPU, "--batch_size=32"),
    r"python main\.py --config configs/regression/diabetes_": (
        *_CPU, "--train.steps=20", "--optim.warmup_steps=2",
    ),
    r"python main\.py --config configs/transformer_sequences\.yaml$": (
        *_CPU, "--train.steps=4", "--optim.warmup_steps=2",
    ),
    r"python -m tools\.monitor ": (),
    r"bash run_commands\.sh supervise ": (*_CPU, "--train.epochs=3"),
    r"bash run_commands\.sh smoke$": (
        *_CPU, "--train.steps=2", "--train.log_every_steps=1",
        "--data.name=image_size=224,num_classes=10,num_examples=16",
    ),
    r"bash run_commands\.sh doctor": (),
    r"python tools/test_tfds_loader_multihost\.py ": (),
    r"python -m tools\.prepare_dataset (?!tfds )": (),
    r"python tools/test_tfds_loader\.py ": ("--num-loops=1", "--loop-batches=4"),
    r"python -m tools\.checkpoint ": (),
    r"python -m tools\.cache_teacher ": (*_CPU, "--train.epochs=3"),
    r"python -m tools\.kd_report ": (),
}  # fmt: skip
# Programs that start others, run by a slow test.
SLOW = r"bash run_commands\.sh doctor|python tools/test_tfds_loader_multihost\.py "
# What cannot run here, or not in seconds -> why, and which test stands for it.
NOT_RUN = {
    r"python -m tools\.generate ": "a trained model: tests/tools/test_generate.py",
    r"python -m tools\.proofs\.text_baselines ": "a trained model: "
    "tests/tools/proofs/test_text_baselines.py",
    r"bash run_commands\.sh setup|source \.venv": "8 GB by network: tests/test_run_commands.py",
    r"bash run_commands\.sh demo$": "minutes, of what is run here: tests/test_run_commands.py",
    r"python -m train\.|python -m tools\.doctor --tpu ": "a cloud: tests/test_tpu_docs.py",
    r"python -m tools\.prepare_dataset tfds ": "a network: tests/tools/test_prepare_mnist.py",
    r"python -m tools\.prepare_dataset text .*bpe": "half a minute; its twin of bytes runs here",
    r"python main\.py --config configs/regression/friedman1_": "parsed by tests/test_readme.py",
    r"python main\.py --config configs/transformer_text\.yaml$": "minutes: tests/test_readme.py",
    r"python -m tools\.proofs\.regression_table$": "minutes: "
    "tests/tools/proofs/test_regression_table.py",
    r"python main\.py .*gs://": "a bucket: tests/test_buckets.py",
    r"python main\.py --config configs/mnist_distributed\.yaml$": "4 processes: "
    "tests/tools/test_prepare_mnist.py",
    r"python main\.py --config configs/transformer_(teacher|distil)": "minutes: "
    "tests/tools/proofs/test_distil_table.py",
    r"python -m tools\.prepare_dataset text .*stdlib_small": "half a minute; its twin runs here",
    r"python -m tools\.cache_teacher --config configs/transformer_": "minutes: "
    "tests/tasks/test_language_distil.py",
    r"python -m tools\.proofs\.distil_table ": "minutes: tests/tools/proofs/test_distil_table.py",
    r"python -m tools\.compile_for_tpu ": "TPU compiler: tests/tools/test_compile_for_tpu.py",
    r"python -m tools\.proofs\.chaos ": "minutes: tests/tools/proofs/test_chaos.py",
    r"python -m tools\.proofs\.benchmark_checkpoint ": "a measurement: tests/test_readme.py",
    r"python -m tools\.benchmark_input ": "a measurement: tests/tools/test_benchmark_input.py",
    r"python -m tools\.proofs\.kd_table ": "an hour of runs: tests/test_readme.py",
    r"bash run_commands\.sh test(-all)?( |$)": "this suite: tests/test_run_commands.py",
    r"python -m tools\.proofs\.mutants ": "minutes: tests/tools/proofs/test_mutants.py",
    r"python -m tools\.benchmark ": "a measurement: tests/tools/benchmark/test_benchmark.py",
    r"python main\.py .*num_processes|torchrun |CPU_NUM": "several: tests/utils/test_runtime.py",
    r"python -m tools\.proofs\.jax_decoder ": "TPU compiler: "
    "tests/tools/proofs/test_jax_decoder.py",
    r"python -m tools\.shape_advisor ": "TPU compiler: tests/tools/test_shape_advisor.py",
    r"python -m tools\.runs ": "parsed by tests/test_readme.py, run in tests/tools/runs",
    r"bash train/sky/": "a cloud: tests/test_train_sky.py",
}
# The documents leave the name of a run open; these are there by then.
PLACEHOLDERS = {
    "runs/digits_teacher/RUN": "runs/digits_teacher/teacher",
    "runs/digits_kd/RUN": "runs/digits_kd/student",
    "runs/digits_student/RUN": "runs/digits_student/first",
}
# One run is ended by SIGTERM, so that `--resume auto` has something to go on with.
BROKEN_OFF = "python main.py --config configs/digits_student.yaml --run.run_id=first"
DIFF = "python -m tools.checkpoint diff runs/digits_student/first runs/digits_student/second"
EXIT_CODES = {BROKEN_OFF: 75, DIFF: 1}
REACHABLE = ("configs", "tools", "train", "run_commands.sh", "requirements.txt")
# The first column of the README's table of a run's files.
RUN_FILES = {
    name.split("/")[0]
    for row in re.findall(r"^\| (`[^|]+`) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    for name in re.findall(r"`([^`]+)`", row)
}


@dataclass
class Done:
    """What a command gave: its exit code, what it printed, and the files that are new."""

    code: int
    output: str
    new: set[str]


@dataclass
class Workplace:
    """The directory in which commands are run, and what they have given so far."""

    folder: Path
    scratch: Path
    done: dict[str, Done] = field(default_factory=dict)

    def find_files(self) -> set[str]:
        """Every file below the directory, but for what was put there to be reached."""
        return {
            path.relative_to(self.folder).as_posix()
            for path in self.folder.rglob("*")
            if path.is_file() and not path.is_symlink()
        }

    def run(self, command: str, *more: str) -> Done:
        """A command as it is printed, with flags at its end that shorten it."""
        tokens = [*shlex.split(command), *get_flags(command), *more]
        tokens = [PLACEHOLDERS.get(token, token) for token in tokens]
        if tokens[:2] == ["bash", "run_commands.sh"]:
            script = start_script(tokens[2:], self.scratch, self.folder)
            assert script.returncode == 0, script.stderr
            tokens = ["python", *get_call(script)]
        before, output = self.find_files(), io.StringIO()
        with contextlib.redirect_stdout(output):
            code = call_program(tokens[1:])
        done = Done(code, output.getvalue(), self.find_files() - before)
        self.done[command] = done
        return done

    def run_document(self, name: str) -> None:
        """All commands of a document that can run, those with a placeholder at the end."""
        left_out = {**NOT_RUN, SLOW: ""}
        wanted = [command for command in COMMANDS[name] if find(left_out, command) is None]
        for command in sorted(wanted, key=lambda command: "/RUN" in command):
            if is_training(command):
                checked = self.run(command, "--check")
                assert (checked.code, checked.new) == (0, set()), command
                assert "nothing was written" in checked.output
            end = end_after_a_step if command == BROKEN_OFF else contextlib.nullcontext
            with end():
                done = self.run(command)
            assert done.code == EXIT_CODES.get(command, 0), command


def find(table: dict, command: str) -> str | None:
    """The first pattern of a table that a command fits."""
    return next((pattern for pattern in table if re.match(pattern, command)), None)


def get_flags(command: str) -> tuple[str, ...]:
    """The flags that shorten a command."""
    pattern = find(SHORTENED, command)
    assert pattern is not None, command
    return SHORTENED[pattern]


def is_training(command: str) -> bool:
    others = ("--eval", "--print-config")
    return command.startswith("python main.py --config") and not any(o in command for o in others)


def call_program(words: list[str]) -> int:
    """The exit code, in this process, of the program that Python is asked to run."""
    name, flags = split_program(words)
    try:
        return import_program(name).main(flags)
    except SystemExit as end:
        return int(end.code or 0)


@contextlib.contextmanager
def end_after_a_step() -> Iterator[None]:
    """SIGTERM to this process as soon as the log tells of a training step."""

    def look(record: logging.LogRecord) -> bool:
        if record.getMessage().startswith("step "):
            logger.removeFilter(look)
            os.kill(os.getpid(), signal.SIGTERM)
        return True

    logger = get_logger()
    logger.addFilter(look)
    try:
        yield
    finally:
        logger.removeFilter(look)


def find_places() -> set[str]:
    """What lies in the repository, where a command that missed its directory would write."""
    names = [path for path in ROOT.iterdir() if not path.name.startswith(".")]
    below = [path for name in ("runs", "data", "report") for path in ROOT.glob(f"{name}/**/*")]
    return {str(path) for path in [*names, *below]}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Iterator[Workplace]:
    folder = tmp_path_factory.mktemp("workplace")
    for name in REACHABLE:
        (folder / name).symlink_to(ROOT / name)
    for number in range(24):
        split = "train" if number < 16 else "validation"
        path = folder / "photos" / split / ("cat", "dog")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (12, 10), (number * 9, 80, 160)).save(path)
    write_mnist(folder / "mnist_files")
    place = Workplace(folder, tmp_path_factory.mktemp("scratch"))
    before = find_places()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield place
    assert find_places() - before == set()


@pytest.fixture(scope="module")
def readme(workplace) -> Workplace:
    workplace.run_document("README.md")
    return workplace


@pytest.fixture(scope="module")
def data(readme) -> Workplace:
    readme.run_document("docs/data.md")
    return readme


@pytest.fixture(scope="module")
def checkpoints(readme) -> Workplace:
    readme.run_document("docs/checkpoints.md")
    return readme


@pytest.fixture(scope="module")
def distillation(checkpoints) -> Workplace:
    checkpoints.run_document("docs/distillation.md")
    return checkpoints


@pytest.fixture(scope="module")
def first_hour(data) -> Workplace:
    data.run_document("docs/first_hour.md")
    return data


def get_run(name: str, files: set[str]) -> set[str]:
    """What lies directly in a run's directory, of some files, in the README's words."""
    begin = f"runs/{name}/"
    found = {path.removeprefix(begin).split("/")[0] for path in files if path.startswith(begin)}
    return {"events.out.*" if one.startswith("events.out.") else one for one in found}


def read_facts(place: Workplace, name: str) -> dict:
    return json.loads((place.folder / "runs" / name / "run.json").read_text())


def test_every_documented_command_is_run_or_said_why_not():
    every = {command for commands in COMMANDS.values() for command in commands}
    run = {command for name in RUN_HERE for command in COMMANDS[name]}
    run |= {command for command in every if re.match(SLOW, command)}
    for command in every:
        reasons, flags = find(NOT_RUN, command), find(SHORTENED, command)
        assert (reasons is None) == (command in run and flags is not None), command


def test_no_pattern_has_outlived_its_command():
    commands = [command for commands in COMMANDS.values() for command in commands]
    used = {find(table, command) for table in (SHORTENED, NOT_RUN) for command in commands}
    assert used - {None} == {*SHORTENED, *NOT_RUN}
    for reason in NOT_RUN.values():
        assert all((ROOT / path).exists() for path in re.findall(r"tests/[\w/.]+", reason)), reason
    told = {*PLACEHOLDERS, *EXIT_CODES}
    assert all(any(one in command for command in commands) for one in told)


@pytest.mark.parametrize(
    "name", ["digits_teacher/teacher", "digits_kd/student"], ids=["teacher", "student"]
)
def test_a_run_of_the_readme_lies_where_it_says(name, readme):
    command = next(one for one in readme.done if one.endswith(f"run_id={name.split('/')[1]}"))
    new = readme.done[command].new
    assert {path.split("/")[0] for path in new} == {"runs"}
    assert get_run(name, new) == RUN_FILES
    assert read_facts(readme, name)["status"] == "complete"
    listed = json.loads((readme.folder / "runs" / name / "artifacts.json").read_text())
    assert {one["path"] for one in listed["artifacts"]} <= {
        path.removeprefix(f"runs/{name}/") for path in new
    }
    assert any(path.endswith("/COMMITTED") for path in new)
    assert load_file(readme.folder / "runs" / name / "student.safetensors")


def test_the_dataset_lies_below_data_and_nothing_else_is_made(readme):
    new = readme.done["python -m tools.prepare_dataset digits --out data"].new
    folders = {path.rpartition("/")[0] for path in new}
    assert folders == {"data/digits/1.0.0"}


def test_the_parts_of_the_readme_leave_nothing_elsewhere(readme):
    assert {path.split("/")[0] for path in readme.find_files()} <= {
        "photos",
        "mnist_files",
        "data",
        "runs",
    }
    assert {path.name for path in (readme.folder / "runs").iterdir()} == {
        "digits_teacher", "digits_kd", "smoke",
    }  # fmt: skip


def test_an_evaluation_and_help_write_nothing(readme):
    commands = [one for one in readme.done if "--eval" in one or "--help" in one]
    assert [readme.done[one].new for one in commands] == [set(), set()]


def test_the_smoke_run_and_the_unnamed_one_are_complete(readme):
    for name in ("smoke", "digits_kd"):
        for folder in (readme.folder / "runs" / name).iterdir():
            assert get_run(f"{name}/{folder.name}", readme.find_files()) == RUN_FILES
            assert read_facts(readme, f"{name}/{folder.name}")["status"] == "complete"


def test_a_folder_becomes_two_versions_in_two_formats(data):
    found = [
        json.loads(path.read_text())["fileFormat"]
        for path in sorted((data.folder / "data" / "photos").glob("*/dataset_info.json"))
    ]
    assert found == ["tfrecord", "array_record"]
    assert len([path for path in data.find_files() if path.startswith("photos/")]) == 24


def test_the_contact_sheet_lies_in_the_working_directory(data):
    done = next(one for command, one in data.done.items() if "--save-grid" in command)
    assert done.new == {"sheet.png"}
    assert "images/s" in done.output
    with Image.open(data.folder / "sheet.png") as sheet:
        assert sheet.width > 6 * 32


def test_a_run_that_was_broken_off_went_on_in_its_directory(checkpoints):
    facts = read_facts(checkpoints, "digits_student/first")
    assert (facts["status"], facts["attempts"]) == ("complete", 3)
    lines = (checkpoints.folder / "runs/digits_student/first/attempts.jsonl").read_text()
    ends = [line["status"] for line in map(json.loads, lines.splitlines()) if "status" in line]
    # The third one was the supervisor's, which found the run complete.
    assert ends == ["preempted", "complete", "complete"]
    names = {path.name for path in (checkpoints.folder / "runs" / "digits_student").iterdir()}
    assert names == {"first", "second"}
    assert get_run("digits_student/first", checkpoints.find_files()) == RUN_FILES


def test_exports_lie_where_out_says_and_other_looks_write_nothing(checkpoints):
    looks = {
        command.split()[3]: one.new for command, one in checkpoints.done.items()
        if "tools.checkpoint " in command and "export" not in command
    }  # fmt: skip
    assert looks == {"list": set(), "verify": set(), "diff": set(), "prune": set()}
    exports = [one.new for command, one in checkpoints.done.items() if " export " in command]
    assert exports == [{"student.safetensors", "student.json"}, {"student.pth"}]
    weights = load_file(checkpoints.folder / "student.safetensors")
    trained = load_file(checkpoints.folder / "runs/digits_student/first/student.safetensors")
    assert all(weights[name].equal(tensor) for name, tensor in trained.items())


def test_answers_lie_in_out_and_a_run_is_taught_by_them(distillation):
    planned, stored = (
        distillation.done[one] for one in COMMANDS["docs/distillation.md"] if "--out runs/a" in one
    )
    assert planned.new == set()
    assert {path.rpartition("/")[0].split("/")[1] for path in stored.new} == {"answers"}
    assert "runs/answers/manifest.json" in stored.new
    assert read_facts(distillation, "digits_kd/stored")["status"] == "complete"


def test_a_report_lies_in_out(distillation):
    done = next(one for command, one in distillation.done.items() if "kd_report" in command)
    assert done.new == {"report/kd_report.json", "report/kd_report.png"}
    (row,) = json.loads((distillation.folder / "report/kd_report.json").read_text())
    finals = read_facts(distillation, "digits_kd/student")["final"]
    assert row["student"] == pytest.approx(finals["eval_top1"], abs=0.01)
    assert row["teacher"] > row["student"] > 10 < row["alone"]


def test_the_first_hour_leaves_trained_runs_and_tells_of_them(first_hour):
    for name in ("mnist/first", "digits_teacher/first", "digits_kd/taught"):
        facts = read_facts(first_hour, name)
        assert (facts["status"], facts["reason"][:4]) == ("complete", "all ")
    (quick,) = (first_hour.folder / "runs" / "mnist_quick_test").iterdir()
    assert read_facts(first_hour, f"mnist_quick_test/{quick.name}")["final"]["steps"] == 20
    monitor = next(one for command, one in first_hour.done.items() if "tools.monitor" in command)
    assert "mnist/first  complete: all 15 steps are done" in monitor.output
    assert monitor.new == set()
    assert list((first_hour.folder / "runs" / "diabetes_mlp").iterdir())
    printed = next(one for command, one in first_hour.done.items() if "--print-config" in command)
    assert "# preset quick_test" in printed.output and printed.new == set()


def test_all_that_the_documents_make_lies_in_these_places(distillation, data):
    assert {path.split("/")[0] for path in data.find_files()} == {
        "photos", "mnist_files", "data", "runs", "report", "sheet.png", "student.safetensors",
        "student.json", "student.pth",
    }  # fmt: skip


@pytest.mark.slow
def test_programs_that_start_others_leave_nothing_behind(data):
    commands = {one for every in COMMANDS.values() for one in every if re.match(SLOW, one)}
    for command in sorted(commands):
        done = data.run(command)
        assert (done.code, done.new) == (0, set()), done.output
