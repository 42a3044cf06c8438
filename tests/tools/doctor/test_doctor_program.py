"""The program around the checks: report, exit code, a bare Python, a pod."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cloud import ROOT, Cloud
from tools.doctor import __main__ as doctor
from tools.doctor import report
from tools.doctor.machine import GREEN, RED, YELLOW, Finding, Machine


def test_every_check_has_a_unique_name_and_a_way_out(machine):
    findings = doctor.examine(machine)
    names = [finding.name for finding in findings]
    assert len(names) == len(set(names)) == len(doctor.CHECKS)
    assert all(f.hint for f in findings if f.level == RED), findings


def test_a_stack_is_for_workers_as_here_it_is_the_environments(capsys):
    assert doctor.main(["--stack=torch_tpu"]) == 2
    assert "needs --tpu; here, run the Python of its environment" in capsys.readouterr().err


def test_a_check_that_raises_is_reported_and_not_green(machine, monkeypatch):
    def check_strange(_: Machine) -> Finding:
        raise KeyError("x")

    monkeypatch.setitem(doctor.CHECKS, "strange", check_strange)
    found = doctor.run_check("strange", machine)
    assert (found.name, found.level) == ("strange", YELLOW)
    assert "could not look: KeyError" in found.text


FINDINGS = [
    Finding("a", GREEN, "fine"),
    Finding("b", YELLOW, "so so", "mend b"),
    Finding("c", RED, "bad", "mend c"),
]


def test_the_report_has_lines_hints_and_json():
    lines = report.format_lines(FINDINGS, colour=False).splitlines()
    assert lines[0].split() == ["green", "a", "fine"]
    assert lines[2].strip() == "-> mend b"
    assert lines[-1] == "1 green, 1 yellow, 1 red"
    assert report.format_hints(FINDINGS).splitlines() == ["red: c: mend c", "yellow: b: mend b"]
    told = json.loads(report.format_json(FINDINGS))
    assert told["verdict"] == "red" and len(told["findings"]) == 3
    assert report.get_verdict(FINDINGS[:1]) == GREEN
    assert "\033[31m" in report.format_lines(FINDINGS, colour=True)


@pytest.mark.parametrize(("level", "code"), [(GREEN, 0), (YELLOW, 0), (RED, 1)])
def test_the_exit_code_is_1_only_for_red(monkeypatch, capsys, level, code):
    check = {"a": lambda machine: Finding("a", level, "x", "y")}
    monkeypatch.setattr(doctor, "CHECKS", check)
    assert doctor.main(["--json"]) == code
    assert json.loads(capsys.readouterr().out)["verdict"] == level
    assert doctor.main(["--fix-hints"]) == code
    assert "ways out:" in capsys.readouterr().out


def test_requirements_come_from_the_configuration_and_flags_win(tmp_path):
    flags = ["--config", "configs/digits_student.yaml", "--shuffle-gib", "7", "--output", "gs://b"]
    requirements = doctor.create_requirements(doctor.create_parser().parse_args(flags))
    assert requirements.data_name == "digits" and requirements.data_dir == str(
        Path("data").absolute()
    )
    assert (requirements.shuffle_gib, requirements.output) == (7.0, "gs://b")


def test_a_deviating_worker_is_marked_and_explained():
    good = [Finding("torch", GREEN, "2.9.0", value="2.9.0"), Finding("tpu", GREEN, "4 chips")]
    odd = [Finding("torch", GREEN, "2.8.0", value="2.8.0"), Finding("tpu", RED, "none", "reboot")]
    table = report.format_table({"0": good, "1": good, "2": odd}).splitlines()
    assert table[0].split() == ["w0", "w1", "w2"]
    assert table[1].split() == ["torch", "green", "green", "green", "*"]
    assert table[2].split() == ["tpu", "green", "green", "red", "*"]
    assert table[4:] == ["w2 torch: 2.8.0", "w2 tpu: none -> reboot"]


def test_the_program_runs_without_anything_installed(tmp_path):
    """A bare Python: every line is there, and red where something is missing."""
    bare = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    if not bare.exists():
        pytest.skip("no Python outside the virtual environment")
    done = subprocess.run(
        [str(bare), "-S", "-E", "-m", "tools.doctor", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    found = {row["name"]: row for row in json.loads(done.stdout)["findings"]}
    assert len(found) == len(doctor.CHECKS)
    assert found["torch"]["level"] == RED and "not installed" in found["torch"]["text"]


@pytest.fixture
def pod(tmp_path) -> Cloud:
    """Two workers with a tree, an environment and a doctor of their own."""
    cloud = Cloud(tmp_path, hosts=2)
    cloud.create()
    for number in range(2):
        tree = cloud.get_home(number) / "trainer"
        (tree / ".venv/bin").mkdir(parents=True)
    return cloud


def set_python(cloud: Cloud, worker: int, text: str) -> None:
    python = cloud.get_home(worker) / "trainer/.venv/bin/python"
    python.write_text(f"#!/bin/bash\n{text}\n")
    python.chmod(0o755)


def examine_pod(cloud: Cloud, *flags: str):
    return cloud.run("tools.doctor", "--tpu=pod", "--zone=z", *flags)


def test_a_pod_is_one_table_with_the_deviating_worker_marked(pod):
    fits = report.format_json([Finding("torch", GREEN, "2.9.0", value="2.9.0")])
    other = report.format_json([Finding("torch", RED, "none", "set it up", value="none")])
    set_python(pod, 0, f"echo '{fits}'")
    set_python(pod, 1, f"echo '{other}'")
    done = examine_pod(pod, "--output=gs://b/r")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "w1 torch: none -> set it up"
    assert "red *" in done.stdout
    remote = next(call for call in pod.get_calls() if call[4] == "ssh")
    assert "--output=gs://b/r" in " ".join(remote)
    set_python(pod, 1, f"echo '{fits}'")
    done = examine_pod(pod)
    assert (done.returncode, done.stdout.splitlines()[1].split()) == (0, ["torch", *["green"] * 2])


def test_a_worker_whose_doctor_cannot_run_is_red_with_the_reason(pod):
    set_python(pod, 0, f"echo '{report.format_json(FINDINGS[:1])}'")
    set_python(pod, 1, "echo 'No module named tools'; exit 1")
    done = examine_pod(pod, "--json")
    assert done.returncode == 1
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["worker"] for row in rows] == [0, 1]
    text = rows[1]["report"]["findings"][0]["text"]
    assert "could not be run on worker 1: No module named tools" in text


@pytest.mark.slow
def test_the_real_doctor_runs_on_two_workers(pod):
    """Each worker has this tree and this Python."""
    for number in range(2):
        tree = pod.get_home(number) / "trainer"
        set_python(pod, number, f'exec {sys.executable} "$@"')
        for name in ("tools", "train", "utils"):
            (tree / name).symlink_to(ROOT / name)
    done = examine_pod(pod, f"--output={pod.folder}/runs")
    assert done.returncode == 1, done.stdout
    levels = {line[:16].strip(): line[16:].split() for line in done.stdout.splitlines()[1:]}
    # They call themselves workers of a TPU and have none: that alone is red, on both alike.
    assert levels["tpu"] == ["red", "red"]
    assert levels["device step"] == levels["output"] == ["green", "green"]
    assert "no TPU" in done.stdout and "yet TPU_WORKER_ID" in done.stdout


def test_the_dry_run_over_a_pod_prints_the_commands(pod):
    done = examine_pod(pod, "--dry-run")
    assert done.returncode == 0
    assert all(line.startswith("gcloud compute tpus tpu-vm ") for line in done.stdout.splitlines())
    assert "-m tools.doctor --json --in-pod" in done.stdout
    assert pod.get_calls() == []


def test_a_missing_pod_gives_one_line_and_code_2(pod):
    done = pod.run("tools.doctor", "--tpu=none")
    assert done.returncode == 2 and "'none' does not exist" in done.stdout
