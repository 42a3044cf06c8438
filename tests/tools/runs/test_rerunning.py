"""`rerun`: the source, the configuration and the environment of a run give the same run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

import main as program
from store.record.attempts import begin_attempt, end_attempt
from store.record.environment import write_environment
from store.record.source import DIFF_FILE, SourceState, read_source
from tests.support.stored_runs import make_run
from tests.support.tiny_parts import SYNTHETIC
from utils.storage.installation import ROOT

PATCH = (
    "diff --git a/x.py b/x.py\nnew file mode 100644\n--- /dev/null\n+++ b/x.py\n@@ -0,0 +1 @@\n+x\n"
)


def read_head() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("this is no git repository: nothing could be made again from it")
    return done.stdout.strip()


def set_source(root: Path, name: str, source: SourceState) -> Path:
    """A complete run of that source."""
    path = make_run(root, name, final={"eval_top1": 1.0}).path
    write_environment(path, {"host": "vm"}, source, 1)
    return path


def test_a_dry_run_prints_everything_and_writes_nothing(ask, root):
    path = set_source(root, "a", SourceState(read_head(), PATCH, "whole"))
    told = json.loads((path / "environment.json").read_text())
    told["packages"]["torch"] = "1.0"
    (path / "environment.json").write_text(json.dumps(told))
    (root / "digits" / "a-rerun").mkdir()
    before = sorted(root.rglob("*"))
    code, out, error = ask("rerun", "digits/a", "--dry-run")
    assert (code, error) == (0, "")
    assert f"commit {read_head()[:12]} and changes in x.py" in out
    assert "changed since: torch 1.0, now 2." in out and out.rstrip().endswith("a-rerun-2")
    assert sorted(root.rglob("*")) == before


def make_unreproducible(root: Path, kind: str) -> str:
    """Write runs that cannot be reproduced, each for one reason."""
    head = read_head()
    sources = {
        "secret": SourceState(head, "", "secret", "main.py seems to hold a private key"),
        "large": SourceState(head, "", "too large", "2 bytes, more than 1"),
        "nowhere": SourceState(reason="no git repository, or no git"),
        "elsewhere": SourceState("0123456789" * 4, "", "none"),
    }
    path = set_source(root, "a", sources.get(kind, SourceState(head, PATCH, "whole")))
    if kind == "old":
        (path / "environment.json").unlink()
    elif kind == "gone":
        (path / DIFF_FILE).unlink()
    elif kind == "torn":
        (path / DIFF_FILE).write_bytes((path / DIFF_FILE).read_bytes()[:-3])
    elif kind == "several":
        for number, source in enumerate(("one", "two"), start=2):
            assert begin_attempt(path, 4, {}, source) == number
            end_attempt(path, number, 4, "complete")
    elif kind == "unconfigured":
        (path / "config_resolved.yaml").write_text("")
    return "live" if kind == "unfinished" else "digits/a"


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        ("old", "has no environment.json"),
        ("secret", "seems to hold a private key"),
        ("large", "more than 1"),
        ("nowhere", "no git repository"),
        ("elsewhere", "commit 012345678901 is not in this repository"),
        ("gone", "source.diff.zst is missing"),
        ("torn", "source.diff.zst is missing"),
        ("several", "2 sources"),
        ("unfinished", "is not complete"),
        ("unconfigured", "config_resolved.yaml"),
    ],
)
def test_runs_that_cannot_be_reproduced_give_one_line(ask, root, kind, word):
    name = make_unreproducible(root, kind)
    before = sorted(root.rglob("*"))
    for flags in ((), ("--dry-run",)):
        code, out, error = ask("rerun", name, *flags)
        assert (code, out, error.count("\n")) == (2, "", 1) and word in error, error
    assert sorted(root.rglob("*")) == before


def test_outside_a_repository_nothing_is_written(ask, root, tmp_path, monkeypatch):
    set_source(root, "a", SourceState(read_head(), "", "none"))
    monkeypatch.setattr("tools.runs.rerunning.ROOT", tmp_path)
    code, out, error = ask("rerun", "digits/a")
    assert (code, out) == (2, "") and "is no git repository" in error


def test_an_unwritable_target_is_refused_before_the_source_is_restored(ask, root, tmp_path):
    set_source(root, "a", SourceState(read_head(), "", "none"))
    (tmp_path / "file").write_text("")
    code, out, error = ask("rerun", "digits/a", "--out", str(tmp_path / "file"))
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert error.startswith("error: --out (") and "cannot be written to" in error


@pytest.mark.slow
def test_a_rerun_is_equal_bit_for_bit_and_a_changed_one_is_reported(ask, tmp_path, monkeypatch):
    if read_source().kept not in ("none", "whole"):
        pytest.skip("the source of this very tree cannot be kept")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = tmp_path / "store"
    flags = (
        *SYNTHETIC,
        "--config=configs/smoke.yaml",
        "--runtime.device=cpu",
        "--train.steps=6",
        "--runtime.num_threads=1",
        "--train.checkpoint_every_steps=3",
        "--run.run_id=a",
        f"--run.output_dir={store}",
    )
    assert program.main([*flags]) == 0
    code, out, error = ask("rerun", "tiny/a", store=store)
    assert code == 0, error
    assert "equal bit for bit" in out
    again = json.loads((store / "tiny" / "a-rerun" / "environment.json").read_text())
    first = json.loads((store / "tiny" / "a" / "environment.json").read_text())
    assert again["source"] == first["source"]
    metrics = store / "tiny" / "a" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines[3]["grad_norm"] *= 1 + 2**-22
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, out, error = ask("rerun", "tiny/a", "--out", str(tmp_path / "other"), store=store)
    assert code == 1 and "part at step" in out and "grad_norm" in out
    assert (tmp_path / "other" / "tiny" / "a-rerun" / "summary.json").is_file()
    assert not list(Path(tmp_path).glob("rerun-*"))
