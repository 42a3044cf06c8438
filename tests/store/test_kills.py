"""Two hundred SIGKILLs at any instant of what a trainer writes, and as many of readers.

A run's lines, renames, checkpoints, end and summary; the index, exports, tags.
"""

from __future__ import annotations

import gc
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

from job.metric_writer import MetricWriter
from store.export import check_export, export_runs
from store.index.database import RunIndex
from store.quality.validation import check_run
from store.query.record import RunRecord
from store.query.tags import TAGS_FILE, change_tags
from store.record.history import read_metrics
from store.record.runs import RunStore
from store.record.summary import SUMMARY_FILE
from tests.support.finished_runs import begin_whole
from tests.support.stored_runs import make_config, make_run
from utils.storage.local import write_atomically
from utils.storage.places import open_folder

_KILLS = 70  # of each kind of work of readers
_STEPS, _CHECKPOINT_EVERY = 24, 6


def work_until_killed(work: Callable[[], object], after_s: float) -> bool:
    """Run work in a child process until it is killed; return whether it was."""
    child = os.fork()
    if child == 0:
        gc.disable()  # what was inherited waits for threads that are not there
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
    columns = {
        key: {numbers[run]: v for run, v in index.read_column(key).items()}
        for key in ("eval.top1", "train.seed", "tag")
    }
    index.close()
    return json.dumps([said, columns], sort_keys=True)


@pytest.mark.slow
def test_an_index_with_killed_writers_equals_a_rebuilt_one(root, tmp_path):
    draw, killed, longest = random.Random(1), 0, 0.12
    for turn in range(_KILLS):
        # Each turn changes the store, and every third one begins without an index.
        shutil.copytree(root / "digits" / "run0", root / "digits" / f"copy{turn}")
        if turn % 3 == 0:
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        is_killed = work_until_killed(
            lambda: RunIndex(str(root)).refresh(), draw.uniform(0.001, longest)
        )
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


@pytest.mark.slow
def test_an_export_is_complete_or_absent(root, tmp_path):
    draw, killed, whole = random.Random(2), 0, 0
    records = [RunRecord(path) for path in sorted((root / "digits").iterdir())]
    for turn, form in zip(range(_KILLS), itertools.cycle(("csv", "json"))):
        out = tmp_path / "out"
        work = lambda out=out, form=form: export_runs(records, out, form)  # noqa: E731
        killed += work_until_killed(work, draw.uniform(0.001, 0.05))
        if out.exists():
            whole += 1
            assert check_export(open_folder(out)) == [], turn
            shutil.rmtree(out)
    # What a killed export has left does not stand in the way of the next one.
    assert export_runs(records, tmp_path / "out", "csv")["tables"][0]["rows"] == 30
    assert killed > _KILLS // 2 and whole < _KILLS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "runs"]


@pytest.mark.slow
def test_killed_tag_changes_apply_completely_or_not_at_all(root):
    folder, killed = open_folder(root / "digits" / "run0"), 0
    draw = random.Random(3)

    def work() -> None:
        for number in itertools.count():
            change_tags(folder, [f"tag{number}"], [])

    for _ in range(_KILLS):
        (root / "digits" / "run0" / TAGS_FILE).unlink(missing_ok=True)
        killed += work_until_killed(work, draw.uniform(0.002, 0.05))
        tags = RunRecord(folder).tags
        assert sorted(tags) == sorted(f"tag{number}" for number in range(len(tags)))
        assert change_tags(folder, ["more"], []) == sorted([*tags, "more"])
    assert killed == _KILLS


def train(root: Path, name: str, checkpoint: Path, pipe: int) -> None:
    """Write what a trainer writes for a run, from its last checkpoint to its end.

    Each line, and when it begins and ends, is acknowledged in `pipe` once it has been written.
    """
    run = RunStore(str(root), "digits").get(name)
    start = int(checkpoint.read_text()) if checkpoint.exists() else 0
    session = begin_whole(run, is_new=False, from_step=start)
    writer = MetricWriter(run.path, first_step=start, attempt=session.attempt)
    os.write(pipe, b"begun\n")
    for step in range(start + 1, _STEPS + 1):
        writer.write(step, "train", {"loss/total": step / 7})
        os.write(pipe, f"{step}\n".encode())
        if step % _CHECKPOINT_EVERY == 0:
            writer.sync()
            write_atomically(checkpoint, str(step))
            session.note_checkpoint(step)
    writer.close()
    (run.path / "student.safetensors").write_bytes(b"weights" * 100)
    os.write(pipe, b"ending\n")
    session.complete(_STEPS, {"eval_top1": 3.0}, "all steps are done")
    session.close()
    os.write(pipe, b"done\n")


def kill_after(
    work: Callable[[int], None], word: str, delay_s: float | None
) -> tuple[list[str], bool]:
    """Let a child work until it has printed a word and a moment more; None: to its end.

    Gives all that it has said, and whether it was killed.
    """
    source, target = os.pipe()
    child = os.fork()
    if child == 0:
        gc.disable()  # what was inherited waits for threads that are not there
        os.close(source)
        try:
            work(target)
        finally:
            os._exit(0)
    os.close(target)
    said = b""
    while word and f"{word}\n".encode() not in said:
        said += (found := os.read(source, 1 << 16))
        if not found:
            break
    if delay_s is not None:
        time.sleep(delay_s)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    while found := os.read(source, 1 << 16):
        said += found
    os.close(source)
    return said.decode().split(), os.WIFSIGNALED(status)


def check_killed(root: Path, name: str, said: list[str], start: int) -> None:
    """No line that was acknowledged is gone or doubled, and nothing is damaged."""
    path = root / "digits" / name
    lines = read_metrics(path) if (path / "metrics.jsonl").exists() else []
    steps = [line["step"] for line in lines]
    wanted = {*range(1, start + 1), *(int(word) for word in said if word.isdigit())}
    assert wanted <= set(steps) and steps == sorted(set(steps)), (name, said, steps)
    assert all(line["loss/total"] == line["step"] / 7 for line in lines)
    if (path / "run.json").exists():
        bad = [one for one in check_run(open_folder(path)) if one.grade != "torn"]
        # Between the two last writes of its life a run lacks its summary, and says so.
        assert [one.file for one in bad] in ([], [SUMMARY_FILE]), bad
        assert not bad or (json.loads((path / "run.json").read_text())["status"] == "complete")


def check_end(root: Path, name: str, work: Callable[[int], None]) -> None:
    """Check that an unkilled continuation is complete and has each line once."""
    said, is_killed = kill_after(work, "done", None)
    assert said[-1] == "done" and not is_killed
    assert check_run(open_folder(root / "digits" / name), is_thorough=True) == []
    lines = read_metrics(root / "digits" / name)
    assert [line["step"] for line in lines] == list(range(1, _STEPS + 1))


@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_a_run_killed_at_any_instant_loses_and_duplicates_nothing(tmp_path, monkeypatch, kills):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root, checkpoint = tmp_path / "runs", tmp_path / "checkpoint"
    draw, killed, number, unfinished = random.Random(kills), 0, 0, 0
    (root / "digits").mkdir(parents=True)
    while killed < kills:
        name = f"run{number}"
        start = int(checkpoint.read_text()) if checkpoint.exists() else 0
        place = draw.choice(
            ["", "begun", str(draw.randint(min(start + 1, _STEPS), _STEPS)), "ending"]
        )
        delay = draw.uniform(0.0, 0.15 if not place else 0.02)
        work = lambda pipe, name=name: train(root, name, checkpoint, pipe)  # noqa: E731
        said, is_killed = kill_after(work, place, delay)
        killed += is_killed
        check_killed(root, name, said, start)
        status = RunStore(str(root), "digits").get(name).read().get("status")
        if status == "complete":
            unfinished += not (root / "digits" / name / SUMMARY_FILE).exists()
        # The last run ends, too, however often it was killed.
        is_last = killed == kills
        if not is_killed or is_last or (status == "complete" and draw.random() < 0.5):
            check_end(root, name, work)
            number += 1
            checkpoint.unlink(missing_ok=True)
        if killed % 25 == 0 and is_killed:
            tell(root)
    assert kills < 100 or unfinished
    kept = tell(root)
    shutil.rmtree(tmp_path / "cache")
    assert kept == tell(root)
