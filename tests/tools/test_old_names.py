"""Programs are listed with a line each, and still run under their old names."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.documented_launches import import_program
from tools.__main__ import OLD_NAMES, list_programs, main
from utils.programs import CommandLine

ROOT = Path(__file__).resolve().parents[2]
MODULES = {
    old.split()[-1]: new.split()[2:]
    for old, new in OLD_NAMES.items()
    if old.startswith("python -m") and "NAME" not in old
}


def show_help(name: str, *words: str) -> str:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), pytest.raises(SystemExit, match=r"^0$"):
        import_program(name).main([*words, "--help"])
    return shown.getvalue()


def test_every_program_is_listed_with_what_it_does(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    programs = list_programs()
    assert {"average", "cache", "demo", "evaluate", "runs", "test_tfds_loader"} <= programs.keys()
    assert not {"benchmark", "compile_for_tpu", "__main__"} & programs.keys()
    assert all(line and line in shown for line in programs.values())
    assert all(f"  {old}: {new}\n" in shown for old, new in OLD_NAMES.items())


def test_every_file_that_runs_another_program_is_in_the_table():
    texts = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "tools").glob("*.py")}
    others = {name for name, text in texts.items() if text.startswith('"""Another name of ')}
    found = {name for name in MODULES if name.partition(".")[2] not in texts}
    assert {f"tools.{name}" for name in others} | found == MODULES.keys()
    # The others are found in the room of the program itself, under the same name.
    assert len(found) == 6
    assert all(MODULES[name][0].partition(".")[2] == name.partition(".")[2] for name in found)


@pytest.mark.parametrize("old", MODULES)
def test_an_old_name_shows_the_help_of_the_program(old, monkeypatch):
    spec = importlib.util.find_spec(old)
    assert spec is not None
    if spec.submodule_search_locations:
        spec = importlib.util.find_spec(f"{old}.__main__")
    program = compile(Path(spec.origin).read_text(encoding="utf-8"), spec.origin, "exec")
    shown = io.StringIO()
    monkeypatch.setattr(sys, "argv", [old, "--help"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with contextlib.redirect_stdout(shown), pytest.raises(SystemExit, match=r"^0$"):
        exec(program, {"__name__": "__main__", "__file__": spec.origin})
    assert shown.getvalue() == show_help(*MODULES[old])


@pytest.mark.parametrize("room", ["proofs", "lab"])
def test_moved_programs_still_run_by_their_names_in_tools(room):
    folder = importlib.import_module(room).__path__
    names = [module.name for module in pkgutil.iter_modules(folder)]
    assert len(names) > 2
    for name in names:
        now = importlib.util.find_spec(f"{room}.{name}")
        assert importlib.util.find_spec(f"tools.{room}.{name}").origin == now.origin


def test_names_that_are_paths_run_the_same_programs():
    script = next(old for old in OLD_NAMES if old.endswith("benchmark_script.py")).split()[1]
    done = subprocess.run(
        [sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    # Both are folded to the width of the terminal.
    assert done.stdout.split() == show_help("lab.delta").split()
    for old, new in OLD_NAMES.items():
        if old.startswith("bash "):
            text = (ROOT / old.split()[1]).read_text(encoding="utf-8")
            assert f'/{new.split()[1]}" "$@"' in text


def list_runs(parser: argparse.ArgumentParser) -> list[object]:
    """What a parser's commands have set as `run`."""
    actions = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    below = [run for one in actions for sub in one.choices.values() for run in list_runs(sub)]
    return [run for run in (parser.get_default("run"), *below) if run is not None]


@pytest.mark.parametrize("name", list_programs())
def test_functions_named_by_programs_exist(name):
    program = import_program(f"tools.{name}").main
    if not isinstance(program, CommandLine):
        pytest.skip("has a main of its own")
    runs = list_runs(program.create_parser()) if program.run is None else [program.run]
    assert runs
    for run in (one for one in runs if isinstance(one, str)):
        module, _, function = run.partition(":")
        text = Path(importlib.util.find_spec(module).origin).read_text(encoding="utf-8")
        assert re.search(rf"^def {function}\(\w+: argparse.Namespace\)", text, re.MULTILINE)
