"""Configured locations may be URLs: only utils.storage makes a `Path` of them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.test_floors import ROOT, list_sources

# Configured keys that hold places, and the names under which they travel.
KEYS = {
    "output_dir",
    "checkpoint_root",
    "cache_dir",
    "root",
    "weights",
    "teacher_weights",
    "teacher_cache",
    "statistics",
    "init_from",
    "resume",
    "compile_cache",
    "remote",
    "checkpoints",
    "out",
}
NAMES = {*KEYS, "place", "base_place", "cache", "url", "checkpoint"}
CALLS = {"Path", "PurePath", "open", "exists", "isdir", "isfile", "listdir", "makedirs"}
OPENER = "utils/storage/"
# train/ builds command lines for other machines, the doctor runs where fsspec is not installed yet.
OTHERS = ("tests/", "train/", "tools/doctor/")


def find_paths(name: str, text: str) -> list[str]:
    """Calls that treat a configured place as a path of this machine."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or _get_name(node.func) not in CALLS or not node.args:
            continue
        attributes = {n.attr for n in ast.walk(node.args[0]) if isinstance(n, ast.Attribute)}
        names = {n.id for n in ast.walk(node.args[0]) if isinstance(n, ast.Name)}
        if attributes & KEYS or names & NAMES:
            found.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    return found


def _get_name(function: ast.expr) -> str:
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def test_no_configured_location_becomes_a_local_path():
    found = []
    for path in list_sources(ROOT):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith((OPENER, *OTHERS)):
            found += find_paths(name, path.read_text(encoding="utf-8"))
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "Path(config.run.output_dir)",
        "Path(output_dir) / experiment",
        "pathlib.Path(str(section.weights)).exists()",
        "open(config.distill.teacher_cache)",
        "os.path.exists(place)",
        "Path(root)",
    ],
)
def test_a_planted_path_is_found(text):
    assert len(find_paths("a.py", text)) == 1


@pytest.mark.parametrize("text", ["open_folder(place)", "to_path(root)", "Path(__file__)"])
def test_access_through_the_file_layer_is_no_violation(text):
    assert find_paths("a.py", text) == []


def test_a_folder_named_after_a_url_is_never_made(tmp_path, monkeypatch):
    from store.record.runs import RunStore
    from utils.storage.places import join_path_or_url, open_folder, to_path

    monkeypatch.chdir(tmp_path)
    run = RunStore("memory://bucket/runs", "e", cache_dir=str(tmp_path / "cache")).get("a")
    open_folder(run.checkpoints).write_text("best.json", "{}")
    open_folder(join_path_or_url("memory://bucket/runs", "x")).write_text("a", "b")
    assert not list(Path(tmp_path).iterdir())
    monkeypatch.setenv("DATA", str(tmp_path / "data"))
    assert to_path("$DATA/x") == tmp_path / "data" / "x"
    assert to_path("~/x") == Path.home() / "x"
