"""run_commands.sh: what each command calls, when it sets up, and what it refuses."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.documented_commands import get_call, start_script
from tests.support.linters import find_linter

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = (
    "setup",
    "setup --tpu",
    "setup --tpu-compiler",
    "setup --jax-export",
    "setup --dev",
    "setup --torch-tpu",
    "doctor",
    "smoke",
    "demo",
    "demo-seeds",
    "train",
    "supervise",
    "service",
    "pod",
    "mirrors",
    "docs",
    "test",
    "test --torch-tpu",
    "test-all",
    "proofs",
    "lint",
    "wheel",
    "baseline",
    "release",
)


def start_bare(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "run_commands.sh", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHON": "true", **environment},  # `true`: a Python that fits
    )


@pytest.mark.parametrize("arguments", [(), ("help",), ("--help",)])
def test_without_a_command_the_script_lists_them(arguments):
    done = start_bare(*arguments)
    assert done.returncode == 0
    for command in COMMANDS:
        assert re.search(rf"^  {command} .*\w.*$", done.stdout, re.MULTILINE), command


WRONG = [
    ("no-such",),
    ("train",),
    ("setup", "--no-such"),
    ("pod",),
    ("pod", "name"),
    ("pod", "name", "ls", "-l"),
    ("pod", "name", "--"),
]


@pytest.mark.parametrize("arguments", WRONG)
def test_an_unknown_command_is_refused_with_code_2(arguments):
    done = start_bare(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")


CALLS = [
    (("demo",), ["-m", "tools.demo", "--data-dir", f"{ROOT}/data", "--output-dir", f"{ROOT}/runs"]),
    (
        ("demo", "--seeds", "3"),
        [
            "-m",
            "tools.demo",
            "--data-dir",
            f"{ROOT}/data",
            "--output-dir",
            f"{ROOT}/runs",
            "--seeds",
            "3",
        ],
    ),
    (
        ("demo-seeds",),
        [
            "-m",
            "tools.demo",
            "--data-dir",
            f"{ROOT}/data",
            "--output-dir",
            f"{ROOT}/runs",
            "--seeds",
            "0",
            "1",
            "2",
        ],
    ),
    (
        ("train", "configs/digits_kd.yaml", "--lr=1", "--kd_alpha", "0.5"),
        ["main.py", "--config", "configs/digits_kd.yaml", "--lr=1", "--kd_alpha", "0.5"],
    ),
    (
        ("smoke", "--train.steps=2"),
        [
            "main.py",
            "--config",
            "configs/smoke.yaml",
            "--run.output_dir",
            f"{ROOT}/runs",
            "--run.run_id",
            "smoke",
            "--run.overwrite",
            "true",
            "--train.steps=2",
        ],
    ),
    (("doctor", "--json"), ["-m", "tools.doctor", "--json"]),
    (
        ("pod", "vm", "--", "python", "main.py", "--config", "c.yaml"),
        [
            "-m",
            "train.xla_dist",
            "--tpu=vm",
            "--venv=.venv",
            "--",
            "python",
            "main.py",
            "--config",
            "c.yaml",
        ],
    ),
    (
        ("mirrors", "--to", "mlflow", "runs/a/b"),
        ["-m", "tools.mirror", "--to", "mlflow", "runs/a/b"],
    ),
    (
        ("supervise", "--config", "c.yaml", "--run.run_id=x"),
        ["main.py", "--config", "c.yaml", "--run.run_id=x", "--resume", "auto"],
    ),
    (("docs", "--serve", "0"), ["-m", "proofs.docs_site", "--serve", "0"]),
    (("service", "--port", "0"), ["-m", "tools.serve", "--store", f"{ROOT}/runs", "--port", "0"]),
    (("test",), ["-m", "pytest", "-m", "not slow and not cuda", "-n", "2", "--dist", "loadfile"]),
    (
        ("test", "tests/test_engine.py"),
        ["-m", "pytest", "-m", "not slow and not cuda", "tests/test_engine.py"],
    ),
    (("release", "notes"), ["-m", "proofs.release", "notes"]),
    (
        ("test-all", "tests/test_engine.py"),
        ["-m", "pytest", "-m", "not cuda", "tests/test_engine.py"],
    ),
]


@pytest.mark.parametrize(("arguments", "call"), CALLS)
def test_a_command_runs_its_program_without_another_setup(tmp_path, arguments, call):
    done = start_script(arguments, tmp_path)
    assert done.returncode == 0, done.stderr
    assert get_call(done) == call
    assert "setting up" not in done.stdout


def test_all_tests_are_the_suite_and_each_slow_file_separately(tmp_path):
    done = start_script(("test-all",), tmp_path)
    assert done.returncode == 0, done.stderr
    suite, *proofs = [call.split("\n") for call in done.stdout.split("CALL\n")[1:]]
    assert suite[:4] == ["-m", "pytest", "-m", "not slow and not cuda"]
    files = [call[5] for call in proofs]
    assert all(call[:5] == ["-m", "pytest", "-q", "-m", "slow and not cuda"] for call in proofs)
    assert len(set(files)) == len(files) > 50
    assert all("mark.slow" in (ROOT / name).read_text() for name in files)


def test_only_a_whole_suite_on_a_committed_tree_is_noted(tmp_path):
    copy, record = tmp_path / "copy", tmp_path / "venv" / ".suite-tree"
    copy.mkdir()
    for name in ("run_commands.sh", *(path.name for path in ROOT.glob("requirements*.txt"))):
        shutil.copy(ROOT / name, copy)
    git = ["git", "-C", str(copy), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "test: a"], check=True)
    tree = subprocess.check_output([*git, "rev-parse", "HEAD^{tree}"], text=True)
    assert start_script(("test", "tests"), tmp_path, copy).returncode == 0
    assert not record.exists()
    (copy / "new").write_text("x")
    assert start_script(("test",), tmp_path, copy).returncode == 0
    assert not record.exists()
    (copy / "new").unlink()
    assert start_script(("test",), tmp_path, copy).returncode == 0
    assert record.read_text() == tree
    record.unlink()
    python = tmp_path / "venv" / "bin" / "python"
    text = python.read_text()
    python.write_text(text + "exit 1\n")
    environment = {**os.environ, "VENV": str(tmp_path / "venv")}
    command = ["bash", "run_commands.sh", "test"]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True)
    assert done.returncode == 1 and not record.exists()


def test_setup_does_nothing_where_the_requirements_are_unchanged(tmp_path):
    done = start_script(("setup",), tmp_path)
    assert done.returncode == 0
    assert done.stdout == ""
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "venv").rglob("*")}
    stamps = (".requirements.sha256", ".extra-dev", ".extra-service", ".extra-export")
    assert set(before) == {tmp_path / "venv" / name for name in ("bin", "bin/python", *stamps)}


def test_changed_requirements_rerun_setup_with_torch_pinned_first(tmp_path):
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


OF_TORCH_TPU = [
    ("setup",),
    ("setup", "--torch-tpu"),
    ("doctor",),
    ("smoke",),
    ("train", "configs/smoke.yaml"),
    ("supervise", "--config", "c.yaml"),
    ("service",),
    ("test", "tests/test_engine.py"),
    ("test", "--torch-tpu", "tests/test_engine.py"),
]


@pytest.mark.parametrize("arguments", OF_TORCH_TPU, ids=" ".join)
def test_an_environment_of_torch_tpu_is_used_as_it_is(tmp_path, monkeypatch, arguments):
    start_script(("setup",), tmp_path)
    venv = tmp_path / "venv-tpu"
    done = start_bare(*arguments, VENV=str(venv), OUTPUT_DIR=str(tmp_path / "runs"))
    assert done.returncode == 0, done.stderr
    assert "pip" not in done.stdout
    assert ("CALL" in done.stdout) == (arguments[0] != "setup")
    assert not (tmp_path / "venv-tpu-tpu").exists()


def test_an_environment_of_torch_tpu_is_renewed_without_torch_xla(tmp_path):
    start_script(("setup",), tmp_path)
    venv = tmp_path / "venv-tpu"
    (venv / ".torch-tpu.sha256").write_text("")  # an installation that did not end
    fake = tmp_path / "python3.11"
    write_program(fake, "exit 0")
    done = start_bare("smoke", VENV=str(venv), PYTHON=str(fake))
    assert done.returncode == 0, done.stderr
    install, smoke = [call.split("\n") for call in done.stdout.split("CALL\n")[1:]]
    assert f"{ROOT}/requirements-torch-tpu.txt" in install
    assert f"{ROOT}/requirements.txt" not in install
    assert "torch_xla" not in (venv / "requirements.txt").read_text().split("==")
    pins = (venv / "constraints.txt").read_text().split()
    assert [pin.partition("=")[0] for pin in pins] == ["torch", "torchvision"]
    assert smoke[0] == "main.py"
    assert not (venv / ".requirements.sha256").exists()


@pytest.mark.parametrize("flag", ["--tpu", "--tpu-compiler", "--jax-export"])
def test_what_needs_torch_xla_is_refused_beside_torch_tpu(tmp_path, flag):
    start_script(("setup",), tmp_path)
    done = start_bare("setup", flag, VENV=str(tmp_path / "venv-tpu"))
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: setup {flag} needs torch_xla, but VENV (")
    assert "CALL" not in done.stdout


@pytest.mark.parametrize("name", ["tpu", "tpu-compiler"])
def test_a_python_without_a_build_of_libtpu_is_refused(tmp_path, name):
    start_script(("setup",), tmp_path)
    venv = tmp_path / "venv"
    write_program(venv / "bin" / "python", '[[ "$2" != *"(3, 12)"* ]]')
    done = start_bare("setup", f"--{name}", VENV=str(venv))
    assert done.returncode == 2 and "CALL\n-m\npip" not in done.stdout
    assert done.stderr.startswith(f"error: setup --{name} needs Python 3.11 or 3.12, but VENV (")
    assert start_bare("setup", VENV=str(venv)).returncode == 0


def test_the_tests_of_torch_tpu_are_a_core_and_any_path(tmp_path):
    core = get_call(start_script(("test", "--torch-tpu"), tmp_path))
    assert core[:7] == ["-m", "pytest", "-m", "not slow and not cuda", "-n", "2", "--dist"]
    assert {"tests/device", "tests/test_engine.py"} <= set(core[8:])
    paths = [word.removeprefix("--ignore=").partition("::")[0] for word in core[8:]]
    assert [path for path in paths if not (ROOT / path).exists()] == []
    call = get_call(start_script(("test", "--torch-tpu", "tests"), tmp_path))
    assert call == ["-m", "pytest", "-m", "not slow and not cuda", "tests"]


def test_the_zone_and_project_of_a_pod_come_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("ZONE", "us-west4-a")
    monkeypatch.setenv("PROJECT", "p")
    call = get_call(start_script(("pod", "vm", "--", "true"), tmp_path))
    assert call[:4] == ["-m", "train.xla_dist", "--zone=us-west4-a", "--project=p"]


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("service", "service"),
        ("test", "service"),
        ("export", "export"),
        ("docs", "dev"),
        ("test", "dev"),
    ],
)
def test_optional_requirements_are_installed_once_and_never_by_setup(tmp_path, command, part):
    start_script(("setup",), tmp_path)
    stamp = tmp_path / "venv" / f".extra-{part}"
    stamp.write_text("of an older list of requirements\n")
    environment = {"VENV": str(tmp_path / "venv"), "OUTPUT_DIR": str(tmp_path / "runs")}
    assert "CALL" not in start_bare("setup", **environment).stdout
    first = start_bare(command, **environment)
    assert first.returncode == 0, first.stderr
    assert f"-r\n{ROOT}/requirements-{part}.txt" in first.stdout
    assert "older" not in stamp.read_text()
    assert f"requirements-{part}" not in start_bare(command, **environment).stdout


@pytest.mark.parametrize(("flag", "extras"), [("--tpu", "tpu"), ("--tpu-compiler", "tpu,pallas")])
def test_extras_are_installed_once_with_the_pinned_torch_xla(tmp_path, flag, extras):
    first = start_script(("setup", flag), tmp_path)
    assert first.returncode == 0, first.stderr
    call = get_call(first)
    assert call[:3] == ["-m", "pip", "install"]
    assert f"torch_xla[{extras}]==2.9.0" in call
    again = start_script(("setup", flag), tmp_path)
    assert (again.returncode, again.stdout) == (0, "")


@pytest.mark.parametrize("flag", ["--tpu", "--torch-tpu"])
def test_a_tpu_vm_without_the_right_python_gets_it_from_its_packages(tmp_path, flag):
    """apt-get brings the Python that was missing; where it is there, nothing is installed."""
    tools, venv = tmp_path / "bin", tmp_path / "venv"
    tools.mkdir()
    write_program(tools / "sudo", 'exec "$@"')
    python = 'if [[ "$2" == venv ]]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; fi'
    write_program(
        tools / "apt-get",
        f'echo "$@" >>{tmp_path}/calls\n'
        f"if [[ \"$*\" == *install* ]]; then printf '%s\\n' '#!/bin/bash' '{python}' "
        f">{tools}/python-of-apt; chmod +x {tools}/python-of-apt; fi",
    )
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHON": "python-of-apt"}
    for _ in range(2):
        done = start_bare("setup", flag, VENV=str(venv), **environment)
        assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    wait = "-qq -o DPkg::Lock::Timeout=600"
    assert calls == [f"{wait} update", f"{wait} install --yes python3.11 python3.11-venv"]


@pytest.mark.parametrize("flag", ["--tpu", "--torch-tpu"])
def test_a_named_python_that_does_not_fit_is_refused_and_none_installed(tmp_path, flag):
    for name, text in (("apt-get", f"touch {tmp_path}/called"), ("old", "exit 1")):
        write_program(tmp_path / name, text)
    for name in ("sudo", "python3", "python3.11", "python3.12", "python3.13"):
        (tmp_path / name).symlink_to(tmp_path / ("apt-get" if name == "sudo" else "old"))
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = start_bare("setup", flag, VENV=str(tmp_path / "venv"), PATH=path, PYTHON="old")
    assert done.returncode == 2 and not (tmp_path / "called").exists()
    assert "error: PYTHON (old) is no Python 3.11 to 3.1" in done.stderr


def write_program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def test_the_doctor_works_before_any_setup(tmp_path):
    """Without an environment it takes the Python that is there."""
    fake = tmp_path / "python"
    fake.write_text('#!/usr/bin/env bash\necho "CALL $*"\n')
    fake.chmod(0o755)
    done = start_bare("doctor", "--json", VENV=str(tmp_path / "none"), PYTHON=str(fake))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "CALL -m tools.doctor --json\n"


SCRIPTS = [ROOT / "run_commands.sh", ROOT / ".ci" / "run", *sorted((ROOT / "train").rglob("*.sh"))]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing_and_failures_stop_the_script(script):
    done = subprocess.run([find_linter("shellcheck"), str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    # supervise.sh looks at the exit codes of what fails, so it does without -e.
    strict = "set -uo pipefail" if script.name == "supervise.sh" else "set -euo pipefail"
    assert f"\n{strict}\n" in script.read_text()


def test_shellcheck_would_find_a_fault(tmp_path):
    (tmp_path / "a.sh").write_text("#!/bin/bash\nrm -rf $1/*\n")
    done = subprocess.run([find_linter("shellcheck"), str(tmp_path / "a.sh")], capture_output=True)
    assert done.returncode == 1


def test_continuous_integration_runs_the_test_command():
    text = (ROOT / ".ci" / "run").read_text()
    assert text.endswith(
        "\nbash run_commands.sh test\nexec bash run_commands.sh test --torch-tpu\n"
    )
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_every_requirement_is_pinned():
    lines = [
        line for path in ROOT.glob("requirements*.txt") for line in path.read_text().splitlines()
    ]
    assert len(list(ROOT.glob("requirements*.txt"))) == 9
    names = [line for line in lines if line and not line.startswith("#")]
    assert names
    assert [line for line in names if "==" not in line] == []
