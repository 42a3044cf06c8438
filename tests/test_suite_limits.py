"""The suite's settings: a test that hangs or kills its process fails by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]


def run_planted(folder: Path, body: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run files of tests under the project's settings, in the suite's two workers."""
    for name in "abcd":
        (folder / f"test_{name}.py").write_text("def test_first(): pass\ndef test_next(): pass\n")
    text = f"import os, threading\ndef test_first(): pass\ndef test_planted(): {body}\n"
    (folder / "test_planted.py").write_text(text)
    settings_file = str(ROOT / "pyproject.toml")
    places = ["-c", settings_file, "--rootdir", str(folder), str(folder)]
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", *options, *places]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S)


@pytest.mark.parametrize(
    ("body", "options"),
    [
        ("os.abort()", ()),
        ("os._exit(0)", ()),
        ("threading.Event().wait()", ("-o", "faulthandler_timeout=2")),
    ],
    ids=["aborts", "leaves", "hangs"],
)
def test_a_test_that_kills_its_worker_fails_by_name(body, options, tmp_path):
    done = run_planted(tmp_path, body, *options)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "crashed while running 'test_planted.py::test_planted'" in done.stdout
    if "abort" in body or options:
        assert "in test_planted\n" in done.stderr


def test_each_test_has_a_time_limit(pytestconfig):
    assert 0 < float(pytestconfig.getini("faulthandler_timeout")) <= 7200
    assert pytestconfig.getini("faulthandler_exit_on_timeout")
    assert pytestconfig.getoption("maxworkerrestart") == "0"


def test_hypothesis_reads_no_clock():
    assert settings.default.deadline is None and settings.default.derandomize
    assert HealthCheck.too_slow in settings.default.suppress_health_check
