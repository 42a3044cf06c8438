"""The source of a run: stored so that it can be restored, and without secrets."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from store.record import source as module
from store.record.environment import choose_variables, read_pinned, write_environment
from store.record.source import DIFF_FILE, pack_diff, read_source, split_diff, unpack_diff
from utils.errors import UserError

TOKEN = "ghp_" + "a1B2" * 9


def git(root: Path, *arguments: str) -> str:
    name = ("-c", "user.name=t", "-c", "user.email=t@t")
    command = ["git", "-C", str(root), *name, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def tree(tmp_path) -> Path:
    """A repository with one commit."""
    root = tmp_path / "tree"
    root.mkdir()
    git(root, "init", "-q")
    (root / "main.py").write_text("print(1)\n")
    (root / "gone.py").write_text("print(2)\n")
    (root / "image.png").write_bytes(bytes(range(256)))
    (root / ".gitignore").write_text("ignored.py\n")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    return root


def read_tree(root: Path) -> dict[str, bytes]:
    paths = (path for path in root.rglob("*") if path.is_file() and ".git" not in path.parts)
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def test_a_clean_tree_is_its_commit(tree):
    found = read_source(tree)
    assert (found.kept, found.diff) == ("none", "")
    assert found.commit == git(tree, "rev-parse", "HEAD").strip() == found.name
    assert found.describe()["dirty"] is False


def test_the_patch_restores_the_same_tree(tree, tmp_path):
    git(tree, "config", "diff.noprefix", "true")
    (tree / "main.py").write_text("print(3)\nno newline")
    (tree / "gone.py").unlink()
    (tree / "image.png").write_bytes(bytes(range(255, -1, -1)))
    (tree / "new").mkdir()
    (tree / "new" / "über.py").write_text("a = 1\n\n+b\n--- c\ndiff --git d")
    (tree / "new" / "empty.py").write_text("")
    found = read_source(tree)
    assert found.kept == "whole" and found.describe()["dirty"]
    assert set(split_diff(found.diff)) == {
        "main.py",
        "gone.py",
        "image.png",
        "new/über.py",
        "new/empty.py",
    }
    again = tmp_path / "again"
    git(tmp_path, "clone", "-q", str(tree), str(again))
    (tmp_path / "x.diff").write_text(unpack_diff(pack_diff(found.diff)))
    git(again, "apply", str(tmp_path / "x.diff"))
    assert read_tree(again) == read_tree(tree)


def test_files_other_than_source_are_left_out(tree):
    (tree / "ignored.py").write_text("x")
    (tree / "weights.bin").write_text("x")
    (tree / "binary.txt").write_bytes(b"\0")
    (tree / "runs" / "e" / "r").mkdir(parents=True)
    (tree / "runs" / "e" / "r" / "run.json").write_text("{}")
    (tree / "runs" / "e" / "r" / "config_resolved.yaml").write_text("a: 1\n")
    assert read_source(tree).kept == "none"


def test_too_large_a_patch_is_not_stored(tree, monkeypatch):
    (tree / "main.py").write_text("x = 1\n" * 100)
    monkeypatch.setattr(module, "MOST_BYTES", 300)
    found = read_source(tree)
    assert (found.kept, found.diff) == ("too large", "") and "more than 300" in found.reason
    assert found.describe()["dirty"] and found.name.endswith("+too large")


def test_a_patch_with_a_secret_is_refused_and_the_secret_not_stored(tree, tmp_path):
    (tree / "main.py").write_text(f"print(1)\nclient = login('{TOKEN}')\n")
    found = read_source(tree)
    assert (found.kept, found.diff) == ("secret", "")
    assert found.reason == "main.py seems to hold a token of GitHub"
    write_environment(tmp_path, {}, found, 1)
    assert TOKEN not in (tmp_path / "environment.json").read_text()
    assert not (tmp_path / DIFF_FILE).exists()


def test_outside_a_repository_the_source_is_unknown(tmp_path):
    found = read_source(tmp_path)
    assert (found.commit, found.kept, found.name) == ("", "unknown", "")
    assert "no git repository" in found.reason


def test_a_torn_patch_is_refused():
    content = pack_diff("diff --git a/x b/x\n" * 100)
    for cut in range(len(content)):
        with pytest.raises(UserError, match="torn or damaged"):
            unpack_diff(content[:cut])


def test_environment_variables_are_stored_by_an_allow_list_without_secrets():
    given = {
        "XLA_FLAGS": "--a",
        "PJRT_DEVICE": "CPU",
        "HOME": "/root",
        "AWS_KEY": "x",
        "TF_CLI_CONFIG_FILE": "x",
        "TF_XLA_FLAGS": "-b",
        "TORCH_TOKEN": TOKEN,
    }
    kept, refused = choose_variables(given)
    assert kept == {"PJRT_DEVICE": "CPU", "TF_XLA_FLAGS": "-b", "XLA_FLAGS": "--a"}
    assert refused == ["TORCH_TOKEN"]


def test_the_environment_has_every_pinned_package(tmp_path):
    assert {"torch", "zstandard", "pydantic"} <= set(read_pinned())
    write_environment(tmp_path, {"host": "vm", "device": "cpu"}, read_source(tmp_path), 2)
    told = json.loads((tmp_path / "environment.json").read_text())
    assert told["packages"]["torch"].startswith("2.") and told["accelerator"] == {"device": "cpu"}
    assert told["attempt"] == 2 and told["source"]["diff"] == "unknown"
