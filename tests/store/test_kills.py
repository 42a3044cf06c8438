"""Two hundred SIGKILLs at any instant of what readers write: index, export, tags."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from store.export import check_export, export_runs
from store.index import RunIndex
from store.record import RunRecord
from store.tags import TAGS_FILE, change_tags
from tests.support.stored_runs import make_config, make_run
from utils.storage import open_folder

pytestmark = pytest.mark.slow
_KILLS = 70  # of each kind of work


def kill_in(work: Callable[[], object], after_s: float) -> bool:
    """Do work in a child of this process until it is killed; gives whether it was."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for number in range(30):
        config = make_config(**{"train.seed": number})
        make_run(
            tmp_path / "runs", f"run{number}", config=config, final={"eval_top1": number * 1.0}
        )
    return tmp_path / "runs"


def tell(root: Path) -> str:
    index = RunIndex(str(root))
    index.refresh()
    rows = index.read_runs(index.read_order())
    numbers = {row["run"]: row["path"] for row in rows}
    said = [{k: v for k, v in row.items() if k not in ("run", "stamp")} for row in rows]
    columns = {key: {numbers[run]: v for run, v in index.read_column(key).items()}
               for key in ("eval.top1", "train.seed", "tag")}  # fmt: skip
    index.close()
    return json.dumps([said, columns], sort_keys=True)


def test_an_index_whose_writers_were_killed_equals_one_made_anew(root, tmp_path):
    draw, killed, longest = random.Random(1), 0, 0.12
    for turn in range(_KILLS):
        # Each turn changes the store, and every third one begins without an index.
        shutil.copytree(root / "digits" / "run0", root / "digits" / f"copy{turn}")
        if turn % 3 == 0:
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        is_killed = kill_in(lambda: RunIndex(str(root)).refresh(), draw.uniform(0.001, longest))
        killed += is_killed
        longest *= 1.3 if is_killed else 0.8  # as long as this machine needs just now
        kept = tell(root)
        if turn % 10 == 0:
            shutil.rmtree(tmp_path / "cache")
            assert kept == tell(root)
    assert killed > _KILLS // 4
    kept = tell(root)
    shutil.rmtree(tmp_path / "cache")
    assert kept == tell(root)


def test_an_export_is_whole_or_not_there(root, tmp_path):
    draw, killed, whole = random.Random(2), 0, 0
    records = [RunRecord(path) for path in sorted((root / "digits").iterdir())]
    for turn, form in zip(range(_KILLS), itertools.cycle(("csv", "json"))):
        out = tmp_path / "out"
        work = lambda out=out, form=form: export_runs(records, out, form)  # noqa: E731
        killed += kill_in(work, draw.uniform(0.001, 0.05))
        if out.exists():
            whole += 1
            assert check_export(open_folder(out)) == [], turn
            shutil.rmtree(out)
    # What a killed export has left does not stand in the way of the next one.
    assert export_runs(records, tmp_path / "out", "csv")["tables"][0]["rows"] == 30
    assert killed > _KILLS // 2 and whole < _KILLS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "runs"]


def test_tags_are_those_of_before_or_after(root):
    folder, killed = open_folder(root / "digits" / "run0"), 0
    draw = random.Random(3)

    def work() -> None:
        for number in itertools.count():
            change_tags(folder, [f"tag{number}"], [])

    for _ in range(_KILLS):
        (root / "digits" / "run0" / TAGS_FILE).unlink(missing_ok=True)
        killed += kill_in(work, draw.uniform(0.002, 0.05))
        tags = RunRecord(folder).tags
        assert sorted(tags) == sorted(f"tag{number}" for number in range(len(tags)))
        assert change_tags(folder, ["more"], []) == sorted([*tags, "more"])
    assert killed == _KILLS
