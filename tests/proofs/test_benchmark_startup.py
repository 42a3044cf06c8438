"""The start-up benchmark refuses invalid flags in one line before it measures."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from proofs import benchmark_startup as tool

RUN = ["--", "--config", "configs/smoke.yaml"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--against", "nowhere"], "--against ('nowhere') is no directory with a main.py; give"),
        (["--against", "file"], "--against ('file') is no directory with a main.py"),
        (["--against", "."], "--against ('.') is no directory with a main.py"),
        (["--rounds", "0"], "--rounds (0) must be at least 1"),
        (["--rounds", "-1"], "--rounds (-1) must be at least 1"),
        (["--json", "/proc/x.json"], "--json ('/proc/x.json') cannot be written: "),
        (["--json", "."], "--json ('.') is a directory"),
    ],
)
def test_invalid_flags_are_refused_before_a_run(flags, words, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("measured"))
    assert tool.main([*flags, *RUN]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {words}")


@pytest.mark.parametrize(
    ("code", "output", "log", "words"),
    [
        (
            2,
            "",
            "a warning\nerror: model.name 'x' is none; see the list\nbye\n",
            "was refused: model.name 'x' is none; see the list",
        ),
        (
            1,
            "",
            "Traceback (most recent call last):\n  File\nKeyError: 'x'\n\n",
            "ended with code 1 before its first step: KeyError: 'x'; run main.py there with",
        ),
        (0, "usage: main.py\n", "", "ended with code 0 before its first step; run main.py there"),
        (-9, "", "", "ended with code -9 before its first step; run main.py there"),
    ],
)
def test_a_run_without_a_step_gives_a_one_line_error(code, output, log, words, monkeypatch, capsys):
    ended = subprocess.CompletedProcess([], code, output, log)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    assert tool.main(RUN) == 2
    (line,) = capsys.readouterr().err.splitlines()
    root = Path(tool.__file__).parents[1]
    assert line.startswith(f"error: the run in {root} {words}") and line.count("error:") == 1


def test_medians_and_the_ratio_of_two_trees_are_printed(tmp_path, monkeypatch, capsys):
    (tmp_path / "main.py").write_text("")

    def start(*_, cwd, **__):
        cpu_s = 3.0 if cwd == tmp_path.resolve() else 1.5
        answer = json.dumps({point: [cpu_s, 2 * cpu_s, 100] for point in tool._POINTS})
        return subprocess.CompletedProcess([], 0, f"a line\n{answer}\n", "")

    monkeypatch.setattr(subprocess, "run", start)
    path = tmp_path / "new" / "figures.json"
    flags = ["--against", str(tmp_path), "--json", str(path)]
    assert tool.main([*flags, *RUN]) == 0
    assert "this over before: 0.500" in capsys.readouterr().out
    found = json.loads(path.read_text())
    assert len(found["rounds"]) == 3 and found["medians"]["before"]["step"] == [3.0, 6.0, 100]
