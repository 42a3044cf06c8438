"""Outputs of the programs depend on the files alone: not on index, disk and rights."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from store.quality.trends import keep_report
from tests.store.test_trends import REPORT
from tests.support.child_runs import ROOT
from utils.storage.local import write_atomically

QUESTIONS = (
    ("list",),
    ("list", "--keys"),
    ("list", "--filter", "eval.top1>60", "--sort", "eval.loss"),
    ("list", "--show", "optim.lr,train.seed", "--reverse"),
    ("show", "run1"),
    ("show", "run2", "--config", "--quantiles"),
    ("compare", "run0", "run1"),
    ("compare", "vit:model.name=vit_tiny", "res:model.name=resnet"),
    ("compare", "--filter", "status=complete"),
    ("gate", "run0", "run2", "--gate", "eval.top1:1:-:minor"),
    ("gate", "model.name=vit_tiny", "run2", "--gate", "eval.loss:-:0.1:blocker", "--unfinished"),
    ("trend",),
    ("cost", "--filter", "status=complete", "--metric", "eval.top1"),
    ("cost", "live"),
    ("validate",),
    ("validate", "--strict", "run1"),
    ("tag", "run1", "--add", "seen"),
)
READING = tuple(words for words in QUESTIONS if words[0] != "tag")


def iterate_teacher_outputs(ask, tmp_path: Path, questions=QUESTIONS) -> list[object]:
    """Return every output, and the tables of an export in each format."""
    found: list[object] = [ask(*words, "--json") for words in questions]
    for form in ("json", "csv", "parquet"):
        out = tmp_path / "tables" / form
        shutil.rmtree(out, ignore_errors=True)
        words = ("export", "--filter", "path", "--format", form, "--out", str(out), "--json")
        found += [ask(*words), {path.name: path.read_bytes() for path in sorted(out.iterdir())}]
    return found


def get_index(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "cache" / "tpudistil" / "index").glob("*.sqlite")
    return path


def test_every_output_is_the_same_from_a_rebuilt_index(ask, root, tmp_path, caplog):
    for day in range(6):
        keep_report(root, {**REPORT, "created": f"2026-11-2{day}T10:00:00Z"})
    ask("tag", "run1", "--add", "seen")
    before = iterate_teacher_outputs(ask, tmp_path)
    assert [one[0] for one in before if isinstance(one, tuple)].count(0) >= 16
    assert not [one for one in before if isinstance(one, tuple) and (one[2] or one[0] == 2)]
    get_index(tmp_path).unlink()
    assert iterate_teacher_outputs(ask, tmp_path) == before
    assert ask("reindex")[0] == 0
    assert iterate_teacher_outputs(ask, tmp_path) == before
    assert caplog.messages == []
    # Of another version, and damaged: one line in the log, and rebuilt.
    with sqlite3.connect(get_index(tmp_path)) as base:
        query = "select name from sqlite_master where name like '%_head'"
        (head,) = base.execute(query).fetchone()
        base.execute(f"update {head} set text = '77' where key = 'version'")
    assert ask(*QUESTIONS[0], "--json") == before[0]
    assert "another version" in caplog.messages[0] and len(caplog.messages) == 1
    get_index(tmp_path).write_bytes(b"SQLite format 3\0" + bytes(9000))
    assert ask(*QUESTIONS[0], "--json") == before[0]
    assert "was rebuilt" in caplog.messages[1] and len(caplog.messages) == 2
    assert iterate_teacher_outputs(ask, tmp_path) == before


def test_an_unwritable_index_is_built_in_memory(ask, root, tmp_path, monkeypatch, caplog):
    keep_report(root, REPORT)
    before = iterate_teacher_outputs(ask, tmp_path, READING)
    # A file where the directory should be: nobody, not even root, can write below it.
    (tmp_path / "blocked").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "blocked"))
    assert caplog.messages == []
    assert ask(*READING[0], "--json") == before[0]
    (line,) = caplog.messages
    assert "kept in memory" in line and "\n" not in line
    assert iterate_teacher_outputs(ask, tmp_path, READING) == before


def test_a_disk_that_is_read_only_gets_one_line(ask, root, tmp_path, monkeypatch):
    """What a read-only file system says, at each write into the store."""
    before = sorted(root.rglob("*"))

    def refuse(self: Path, mode: str = "r", *rest: object, **options: object):
        if set(mode) & set("wax+") and self.is_relative_to(root):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))
        return opened(self, mode, *rest, **options)

    def refuse_folder(self: Path, *rest: object, **options: object):
        if self.is_relative_to(root) and not self.is_dir():
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))
        return made(self, *rest, **options)

    def refuse_new(path: str, flags: int, *rest: object, **options: object) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR) and Path(path).is_relative_to(root):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return opened_low(path, flags, *rest, **options)

    opened, made, opened_low = Path.open, Path.mkdir, os.open
    monkeypatch.setattr(os, "open", refuse_new)
    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "mkdir", refuse_folder)
    with pytest.raises(OSError, match="Read-only"):
        write_atomically(root / "a", "")
    report = tmp_path / "report.json"
    report.write_text(json.dumps(REPORT))
    check_writing(ask, root, report)
    for words in READING:
        if words[0] != "trend":
            assert ask(*words, "--json")[0] in (0, 1, 3), words
    assert sorted(root.rglob("*")) == before


def check_writing(ask, root: Path, report: Path) -> None:
    """Each command that would write into a store says in one line that it cannot."""
    for words in (
        ("tag", "run1", "--add", "x"),
        ("export", "run1", "--out", str(root / "tables")),
        ("compare", "run0", "run1", "--html", str(root / "a" / "page.html")),
        ("compare", "run0", "run1", "--html", str(root / "page.html")),
        ("trace", "run1", "--out", str(root / "run.pftrace")),
        ("trend", "--add", str(report)),
    ):
        code, out, error = ask(*words)
        assert (code, out) == (2, ""), words
        assert error.startswith("error: ") and error.count("\n") == 1, words
        assert "Read-only file system" in error, words


_MOUNTS = 'mount -o bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'


def start_read_only(place: Path, *command: str, **options) -> subprocess.CompletedProcess[str]:
    """A program for which a directory lies on a read-only file system."""
    return subprocess.run(
        ["unshare", "--mount", "bash", "-c", _MOUNTS, str(place), *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        **options,
    )


@pytest.mark.slow
def test_a_real_read_only_mount_is_read_and_not_written(root, tmp_path):
    (tmp_path / "cache").mkdir(exist_ok=True)
    if shutil.which("unshare") is None or start_read_only(tmp_path, "true").returncode:
        pytest.skip("this machine lets nobody mount: no read-only disk to test on")
    report = tmp_path / "report.json"
    report.write_text(json.dumps(REPORT))
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def create_ask(place: Path):
        def ask(*words: str) -> tuple[int, str, str]:
            command = (sys.executable, "-m", "tools.runs", *words, "--store", str(root))
            done = start_read_only(place, *command, env=environment)
            return done.returncode, done.stdout, done.stderr

        return ask

    (tmp_path / "elsewhere").mkdir()
    free = create_ask(tmp_path / "elsewhere")
    wanted = {words: free(*words, "--json")[:2] for words in READING if words[0] != "trend"}
    assert {code for code, _ in wanted.values()} <= {0, 1, 3}
    for place in (root, tmp_path / "cache"):
        ask = create_ask(place)
        assert {words: ask(*words, "--json")[:2] for words in wanted} == wanted
    before = sorted(root.rglob("*"))
    check_writing(create_ask(root), root, report)
    assert sorted(root.rglob("*")) == before
