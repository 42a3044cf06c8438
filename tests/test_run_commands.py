"""run_commands.sh: what each command calls, when it sets up, and what it refuses."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.documented_commands import get_call, start_script

ROOT = Path(__file__).resolve().parents[1]


def start_bare(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "run_commands.sh", *arguments], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, **environment},
    )  # fmt: skip


@pytest.mark.parametrize("arguments", [(), ("help",), ("--help",)])
def test_without_a_command_it_lists_them(arguments):
    done = start_bare(*arguments)
    assert done.returncode == 0
    for command in ("setup", "demo", "demo-seeds", "train", "test", "test-all"):
        assert f"\n  {command} " in done.stdout


@pytest.mark.parametrize("arguments", [("no-such",), ("train",)])
def test_a_wrong_command_is_refused_with_code_2(arguments):
    done = start_bare(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")


CALLS = [
    (("demo",), ["tools/demo.py", "--data-dir", f"{ROOT}/data", "--output-dir", f"{ROOT}/runs"]),
    (("demo", "--seeds", "3"), ["tools/demo.py", "--data-dir", f"{ROOT}/data", "--output-dir",
                                f"{ROOT}/runs", "--seeds", "3"]),
    (("demo-seeds",), ["tools/demo.py", "--data-dir", f"{ROOT}/data", "--output-dir",
                       f"{ROOT}/runs", "--seeds", "0", "1", "2"]),
    (("train", "configs/digits_kd.yaml", "--lr=1", "--kd_alpha", "0.5"),
     ["main.py", "--config", "configs/digits_kd.yaml", "--lr=1", "--kd_alpha", "0.5"]),
    (("test",), ["-m", "pytest", "-m", "not slow and not cuda"]),
    (("test", "tests/test_engine.py"),
     ["-m", "pytest", "-m", "not slow and not cuda", "tests/test_engine.py"]),
    (("test-all",), ["-m", "pytest", "-m", "not cuda"]),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "call"), CALLS)
def test_a_command_calls_what_it_says_and_does_not_set_up_again(tmp_path, arguments, call):
    done = start_script(arguments, tmp_path)
    assert done.returncode == 0, done.stderr
    assert get_call(done) == call
    assert "setting up" not in done.stdout


def test_setup_does_nothing_where_the_requirements_are_unchanged(tmp_path):
    done = start_script(("setup",), tmp_path)
    assert done.returncode == 0
    assert done.stdout == ""
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "venv").rglob("*")}
    assert set(before) == {tmp_path / "venv" / name for name in
                           ("bin", "bin/python", ".requirements.sha256")}  # fmt: skip


def test_other_requirements_set_up_again_and_pin_torch_first(tmp_path):
    """A Python that only writes down its calls stands in for the long installation."""
    fake, calls, venv = tmp_path / "python3.11", tmp_path / "calls", tmp_path / "venv"
    # `python -m venv DIR` makes the directory with a copy of this very script as its Python.
    fake.write_text(
        f'#!/usr/bin/env bash\necho "$@" >>{calls}\n'
        f'if [[ "$2" == venv ]]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; fi\n'
    )
    fake.chmod(0o755)
    venv.mkdir()
    (venv / ".requirements.sha256").write_text("of an older requirements.txt\n")
    done = start_bare("setup", VENV=str(venv), PYTHON=str(fake))
    assert done.returncode == 0, done.stderr
    lines = calls.read_text().splitlines()
    assert any(line == f"-m venv {venv}" for line in lines)
    assert lines[-1].startswith("-m pip install")
    assert lines[-1].endswith(f"-r {ROOT}/requirements.txt")
    pins = (venv / "constraints.txt").read_text().split()
    assert [pin.partition("==")[0] for pin in pins] == ["torch", "torchvision", "torch_xla"]
    assert str(venv / "constraints.txt") in (venv / "pip.conf").read_text()
    assert "older" not in (venv / ".requirements.sha256").read_text()
    count = len(lines)
    assert start_bare("setup", VENV=str(venv), PYTHON=str(fake)).returncode == 0
    assert len(calls.read_text().splitlines()) == count


def test_continuous_integration_runs_the_test_command():
    text = (ROOT / ".ci" / "run").read_text()
    assert "exec bash run_commands.sh test\n" in text
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_every_requirement_is_pinned():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    names = [line for line in lines if line and not line.startswith("#")]
    assert names
    assert [line for line in names if "==" not in line] == []
