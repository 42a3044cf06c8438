"""Results of single examples: what is kept of them, and what a rollback removes."""

from __future__ import annotations

import random
import shutil
import uuid
from pathlib import Path

import pytest

from store.quality.validation import check_run
from store.record.hits import HITS_FILE, Hits, HitsFile, format_hits, parse_hits
from store.record.mirror import Mirror, pull
from tests.support.stored_runs import make_run
from utils.storage.places import open_folder


def make_hits(step: int, examples: int = 20) -> Hits:
    draw = random.Random(step)
    return Hits(step, examples, "0f" * 32, draw.randbytes((examples + 7) // 8))


def read_steps(folder: Path) -> dict[str, int]:
    path = folder / HITS_FILE
    found = parse_hits(path.read_bytes()) if path.exists() else {}
    return {name: one.step for name, one in found.items()}


def test_the_last_and_the_best_evaluation_are_kept(tmp_path):
    file = HitsFile(tmp_path)
    for step, is_best in ((5, True), (10, False), (15, True), (20, False)):
        file.note(make_hits(step), is_best=is_best)
    assert read_steps(tmp_path) == {"last": 20, "best": 15, "best_before": 5}
    found = parse_hits((tmp_path / HITS_FILE).read_bytes())
    assert found == {"last": make_hits(20), "best": make_hits(15), "best_before": make_hits(5)}
    assert found["best"].count() == sum(bin(byte).count("1") for byte in make_hits(15).bits)


@pytest.mark.parametrize(
    ("step", "kept"),
    [
        (20, {"last": 20, "best": 15, "best_before": 5}),
        (19, {"best": 15, "best_before": 5}),
        (15, {"best": 15, "best_before": 5}),
        (14, {"best": 5}),
        (5, {"best": 5}),
        (4, {}),
        (0, {}),
    ],
)
def test_hits_of_repeated_steps_are_dropped(tmp_path, step, kept):
    file = HitsFile(tmp_path)
    for made, is_best in ((5, True), (15, True), (20, False)):
        file.note(make_hits(made), is_best=is_best)
    again = HitsFile(tmp_path)  # another program goes on
    again.drop_later_than(step)
    assert read_steps(tmp_path) == kept
    again.note(make_hits(30), is_best=False)
    assert read_steps(tmp_path) == {**kept, "last": 30}


def test_a_repeated_evaluation_replaces_the_first(tmp_path):
    file = HitsFile(tmp_path)
    file.note(make_hits(5), is_best=True)
    file.note(make_hits(10), is_best=True)
    again = HitsFile(tmp_path)
    again.drop_later_than(10)
    # The state of step 10 has the score of step 10: the same score is no better one.
    again.note(make_hits(10), is_best=False)
    assert read_steps(tmp_path) == {"last": 10, "best": 10, "best_before": 5}


def test_no_torn_or_changed_file_is_read(tmp_path):
    run = make_run(tmp_path / "runs", "a")
    content = format_hits({"last": make_hits(7), "best": make_hits(3)})
    assert parse_hits(content) and parse_hits(b"") is None and parse_hits(b"[]\n") is None
    for length in range(len(content)):
        assert parse_hits(content[:length]) is None, length
        assert parse_hits(content + content[:1]) is None
    for place in range(len(content)):
        for bit in range(8):
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            assert parse_hits(bytes(changed)) is None, (place, bit)
    (run.path / HITS_FILE).write_bytes(content)
    assert check_run(open_folder(run.path)) == []
    (run.path / HITS_FILE).write_bytes(content[:-1])
    assert [one.grade for one in check_run(open_folder(run.path))] == ["damage"]
    # Who goes on begins anew.
    HitsFile(run.path).note(make_hits(9), is_best=False)
    assert read_steps(run.path) == {"last": 9}


def test_another_machine_reads_hits_from_the_bucket(tmp_path):
    remote, here = f"memory://{uuid.uuid4().hex}/a", tmp_path / "here"
    here.mkdir()
    mirror = Mirror(here, remote, 1, from_step=0)
    HitsFile(here).note(make_hits(5), is_best=True)
    mirror.flush()
    shutil.rmtree(here)
    mirror.close()
    pull(tmp_path / "there", remote)
    assert read_steps(tmp_path / "there") == {"last": 5, "best": 5}
