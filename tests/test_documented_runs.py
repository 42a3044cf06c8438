"""Documented commands, run as printed, and where they write their files.

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

from tests.store.test_trends import REPORT, VERDICT
from tests.support.documented_commands import (
    ROOT,
    get_call,
    list_documents,
    read_commands,
    start_script,
)
from tests.support.documented_flags import NOT_RUN, SHORTENED, SLOW
from tests.support.documented_launches import import_program, split_program
from tests.support.language import write_texts
from tests.support.mnist_files import write_mnist
from utils.log import get_logger

COMMANDS = {
    path.relative_to(ROOT).as_posix(): read_commands(path.read_text(encoding="utf-8"))
    for path in list_documents()
}
RUN_HERE = (
    "README.md",
    "docs/data.md",
    "docs/checkpoints.md",
    "docs/distillation.md",
    "docs/first_hour.md",
    "docs/regression.md",
    "docs/language.md",
    "docs/store.md",
    *(name for name in COMMANDS if name.startswith("examples/")),  # by tests/test_examples.py
)
# The documents leave the name of a run open; these are there by then.
PLACEHOLDERS = {
    "runs/digits_teacher/RUN": "runs/digits_teacher/teacher",
    "runs/digits_kd/RUN": "runs/digits_kd/student",
    "runs/digits_student/RUN": "runs/digits_student/first",
    "runs/transformer_text/RUN": "runs/transformer_text/first",
}
# One run is ended by SIGTERM, so that `--resume auto` has something to go on with.
BROKEN_OFF = "python main.py --config configs/digits_student.yaml --run.run_id=first"
DIFF = "python -m tools.checkpoint diff runs/digits_student/first runs/digits_student/second"
COMPARED = "python -m tools.runs compare digits_student/first digits_student/second --exact"
EXIT_CODES = {BROKEN_OFF: 75, DIFF: 1, COMPARED: 1}
# They ask for speed, or for more than a tiny run learns: they pass, fail or cannot decide.
GATES = "python -m tools.runs gate "
REACHABLE = ("configs", "tools", "train", "run_commands.sh", "requirements.txt")
# The first column of the table of a run's files.
_TABLE = (ROOT / "docs/store.md").read_text(encoding="utf-8").split("| file | content |")[1]
RUN_FILES = {
    name.split("/")[0]
    for row in re.findall(r"^\| (`[^|]+`) \|", _TABLE.split("\n\n")[0], re.MULTILINE)
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
        wanted = [
            command
            for command in COMMANDS[name]
            if find(left_out, command) is None and command not in self.done
        ]
        for command in sorted(wanted, key=lambda command: "/RUN" in command):
            if is_training(command):
                checked = self.run(command, "--check")
                assert (checked.code, checked.new) == (0, set()), command
                assert "nothing was written" in checked.output
            end = end_after_a_step if command == BROKEN_OFF else contextlib.nullcontext
            with end():
                done = self.run(command)
            codes = (0, 1, 3) if command.startswith(GATES) else (EXIT_CODES.get(command, 0),)
            assert done.code in codes, command


def find(table: dict, command: str) -> str | None:
    """Return the first pattern of a table that matches a command."""
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
    """Send SIGTERM to this process once the log shows a training step."""

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
    write_texts(folder / "texts", 40)
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
    # Its model of text is tried on the small texts of another document.
    data.run(next(one for one in COMMANDS["docs/language.md"] if "--name stdlib_small" in one))
    data.run_document("docs/first_hour.md")
    return data


@pytest.fixture(scope="module")
def language(first_hour) -> Workplace:
    first_hour.run_document("docs/language.md")
    return first_hour


@pytest.fixture(scope="module")
def store_queries(checkpoints) -> Workplace:
    text = (ROOT / "docs/store.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```yaml\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    for name, block in zip(("gates", "prices"), blocks, strict=True):
        (checkpoints.folder / f"{name}.yaml").write_text(block)
    (checkpoints.folder / "report.json").write_text(json.dumps(REPORT))
    (checkpoints.folder / "verdict.json").write_text(json.dumps(VERDICT))
    for run, tag in (("digits_student/first", "base"), ("digits_student/second", "candidate")):
        checkpoints.run(f"python -m tools.runs tag {run} --add {tag}")
    checkpoints.run_document("docs/store.md")
    return checkpoints


def get_run(name: str, files: set[str]) -> set[str]:
    """What lies directly in a run's directory, of some files, in the words of docs/store.md."""
    begin = f"runs/{name}/"
    found = {path.removeprefix(begin).split("/")[0] for path in files if path.startswith(begin)}
    found.discard("source.diff.zst")  # only where the source differs from its commit
    return {"events.out.*" if one.startswith("events.out.") else one for one in found}


def read_facts(place: Workplace, name: str) -> dict:
    return json.loads((place.folder / "runs" / name / "run.json").read_text())


def test_every_documented_command_is_run_or_has_a_reason():
    every = {command for commands in COMMANDS.values() for command in commands}
    run = {command for name in RUN_HERE for command in COMMANDS[name]}
    run |= {command for command in every if re.match(SLOW, command)}
    for command in every:
        reasons, flags = find(NOT_RUN, command), find(SHORTENED, command)
        assert (reasons is None) == (command in run and flags is not None), command


def test_every_pattern_matches_a_documented_command():
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
def test_a_run_of_the_readme_is_written_where_stated(name, readme):
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


def test_the_dataset_is_written_below_data_only(readme):
    new = readme.done["python -m tools.prepare_dataset digits --out data"].new
    folders = {path.rpartition("/")[0] for path in new}
    assert folders == {"data/digits/1.0.0"}


def test_commands_of_the_readme_write_nothing_elsewhere(readme):
    assert {path.split("/")[0] for path in readme.find_files()} <= {
        "photos",
        "mnist_files",
        "texts",
        "data",
        "runs",
    }
    assert {path.name for path in (readme.folder / "runs").iterdir()} == {
        "digits_teacher",
        "digits_kd",
        "smoke",
    }


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


def test_the_contact_sheet_is_written_to_the_working_directory(data):
    done = next(one for command, one in data.done.items() if "--save-grid" in command)
    assert done.new == {"sheet.png"}
    assert "images/s" in done.output
    with Image.open(data.folder / "sheet.png") as sheet:
        assert sheet.width > 6 * 32


def test_an_interrupted_run_resumed_in_its_directory(checkpoints):
    facts = read_facts(checkpoints, "digits_student/first")
    assert (facts["status"], facts["attempts"]) == ("complete", 2)
    lines = (checkpoints.folder / "runs/digits_student/first/attempts.jsonl").read_text()
    ends = [line["status"] for line in map(json.loads, lines.splitlines()) if "status" in line]
    # The supervisor found the run complete and began no attempt.
    assert ends == ["preempted", "complete"]
    names = {path.name for path in (checkpoints.folder / "runs" / "digits_student").iterdir()}
    assert names == {"first", "second"}
    assert get_run("digits_student/first", checkpoints.find_files()) == RUN_FILES


def test_exports_are_written_to_out_and_evaluations_write_nothing(checkpoints):
    looks = {
        command.split()[3]: one.new
        for command, one in checkpoints.done.items()
        if "tools.checkpoint " in command and "export" not in command
    }
    assert looks == {"list": set(), "verify": set(), "diff": set(), "prune": set()}
    exports = [one.new for command, one in checkpoints.done.items() if " export " in command]
    assert exports == [{"student.safetensors", "student.json"}, {"student.pth"}]
    weights = load_file(checkpoints.folder / "student.safetensors")
    trained = load_file(checkpoints.folder / "runs/digits_student/first/student.safetensors")
    assert all(weights[name].equal(tensor) for name, tensor in trained.items())


def test_stored_logits_are_written_to_out_and_train_a_run(distillation):
    planned, stored = (
        distillation.done[one] for one in COMMANDS["docs/distillation.md"] if "--out runs/a" in one
    )
    assert planned.new == set()
    assert {path.rpartition("/")[0].split("/")[1] for path in stored.new} == {"answers"}
    assert "runs/answers/manifest.json" in stored.new
    assert read_facts(distillation, "digits_kd/stored")["status"] == "complete"


def test_a_report_is_written_to_out(distillation):
    done = next(one for command, one in distillation.done.items() if "kd_report" in command)
    assert done.new == {"report/kd_report.json", "report/kd_report.png"}
    (row,) = json.loads((distillation.folder / "report/kd_report.json").read_text())
    finals = read_facts(distillation, "digits_kd/student")["final"]
    assert row["student"] == pytest.approx(finals["eval_top1"], abs=0.01)
    assert row["teacher"] > row["student"] > 10 < row["alone"]


def test_the_first_hour_leaves_trained_runs_and_lists_them(first_hour):
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


def test_the_runs_of_language_learn_and_write(language):
    for name in ("transformer_text/first", "transformer_teacher/teacher"):
        assert read_facts(language, name)["final"]["eval_bits_per_byte"] > 0
    taught = [
        read_facts(language, f"transformer_distil/{one.name}")["teachers"]
        for one in (language.folder / "runs" / "transformer_distil").iterdir()
    ]
    # One by the teacher itself, one by its stored answers.
    assert sorted(len(teachers) for teachers in taught) == [0, 1]
    printed = {command.split()[2]: one.output for command, one in language.done.items()}
    assert "def main(" in printed["tools.generate"]
    assert "| runs/transformer_text/first |" in printed["proofs.text_baselines"]
    (pieces,) = (language.folder / "data").glob("*_bpe/tokens.json")
    assert json.loads(pieces.read_text())["vocab_size"] <= 300


def test_a_regression_serves_as_teacher_and_appears_in_its_table(workplace):
    workplace.run_document("docs/regression.md")
    (taught,) = (workplace.folder / "runs" / "friedman1_kd").iterdir()
    facts = read_facts(workplace, f"friedman1_kd/{taught.name}")
    assert facts["teachers"][0]["r2"] > 0 and facts["final"]["teacher_mse"] > 0
    table = workplace.done["python -m proofs.tables.regression_table"].output
    assert len([line for line in table.splitlines() if line.startswith("| linnerud |")]) == 5


def test_queries_about_runs_succeed_and_change_no_run(store_queries):
    commands = [one for one in COMMANDS["docs/store.md"] if find(NOT_RUN, one) is None]
    done = {one: store_queries.done[one] for one in commands}
    new = {path for one in done.values() for path in one.new}
    kept = {path for path in new if path.startswith("runs/benchmarks/")}
    assert len(kept) == 2
    made = {"comparison.html", "exported", "trends.html", "first.perfetto-trace", "first.json"}
    assert {path.split("/")[0] for path in new - kept} == made
    assert all("/checkpoints/" not in path for path in new)
    listed = json.loads(next(one.output for command, one in done.items() if "tag=paper" in command))
    assert "paper" in json.dumps(listed)
    assert "train.seed" in done[COMPARED].output


def test_documented_commands_write_only_to_known_places(
    distillation, data, store_queries, language
):
    assert {path.split("/")[0] for path in data.find_files()} == {
        "photos",
        "mnist_files",
        "texts",
        "data",
        "runs",
        "report",
        "sheet.png",
        "exported",
        "student.safetensors",
        "student.json",
        "student.pth",
        "comparison.html",
        "gates.yaml",
        "prices.yaml",
        "report.json",
        "verdict.json",
        "trends.html",
        "first.perfetto-trace",
        "first.json",
    }


@pytest.mark.slow
def test_programs_that_start_others_leave_nothing_behind(data):
    commands = {one for every in COMMANDS.values() for one in every if re.match(SLOW, one)}
    for command in sorted(commands):
        done = data.run(command)
        assert (done.code, done.new) == (0, set()), done.output
