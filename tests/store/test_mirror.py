"""A run's upload to its bucket: immutable segments, rewinds, and complete recovery."""

from __future__ import annotations

import json
import random
import uuid
from pathlib import Path

import pytest

from job.metric_writer import MetricWriter
from store.record.artifacts import publish_artifacts
from store.record.attempts import begin_attempt, end_attempt, read_attempts
from store.record.history import read_metrics
from store.record.mirror import Mirror, pull, read_segments
from store.record.spans import SPANS_FILE, SpanWriter, parse_spans
from store.record.windows import SKETCHES_FILE, QuantileWriter, parse_sketches
from tests.support.faulty import register
from utils.storage.folder import StorageError
from utils.storage.local import compute_crc32c
from utils.storage.places import open_folder


def attempt(folder: Path, remote: str, *, from_step: int, to_step: int) -> None:
    """What one program writes; none of it is sent but by `close`, as a short run does."""
    folder.mkdir(parents=True, exist_ok=True)
    number = begin_attempt(folder, from_step, {})
    mirror = Mirror(folder, remote, number, from_step=from_step)
    writer = MetricWriter(folder, first_step=from_step, attempt=number, mirror=mirror)
    for step in range(from_step + 1, to_step + 1):
        writer.write(step, "train", {"loss/total": step / 7})
        if step % 5 == 0:
            writer.sync()
    writer.close()
    mirror.close()


def get_steps(lines: list[dict]) -> list[tuple[int, int]]:
    return [(line["step"], line["attempt"]) for line in lines]


def test_the_bucket_gives_the_history_without_repeated_steps(tmp_path):
    remote = f"memory://{uuid.uuid4().hex}/a"
    attempt(tmp_path / "one", remote, from_step=0, to_step=13)
    # Another machine, from the checkpoint of step 10.
    pull(tmp_path / "two", remote)
    assert read_metrics(tmp_path / "two") == read_metrics(tmp_path / "one")
    attempt(tmp_path / "two", remote, from_step=10, to_step=17)
    lines = read_segments(open_folder(remote))
    assert get_steps(lines) == [(s, 1) for s in range(1, 11)] + [(s, 2) for s in range(11, 18)]
    assert lines == read_metrics(tmp_path / "two")
    assert [one["attempt"] for one in read_attempts(tmp_path / "two")] == [1, 2]


def test_segments_are_uploaded_exactly_once(tmp_path):
    remote = f"memory://{uuid.uuid4().hex}/a"
    attempt(tmp_path, remote, from_step=0, to_step=12)
    folder = open_folder(remote).child("metrics")
    names = ["a001-000000.jsonl", "a001-000001.jsonl", "a001-000002.jsonl"]
    assert folder.list_names() == names
    texts = [folder.read_text(name) for name in names]
    assert json.loads(texts[0].split("\n")[0]) == {"rewind": 0}
    assert [text.count("loss") for text in texts] == [5, 5, 2]


def test_a_rewind_within_an_attempt_holds_on_the_bucket_too(tmp_path):
    remote = f"memory://{uuid.uuid4().hex}/a"
    mirror = Mirror(tmp_path, remote, 1, from_step=0)
    writer = MetricWriter(tmp_path, attempt=1, mirror=mirror)
    for step in (1, 2, 3, 4):
        writer.write(step, "train", {"loss/total": 1.0})
    writer.write(2, "eval", {"top1": 5.0})
    writer.sync()
    writer.rewind(2)
    writer.write(3, "train", {"loss/total": 2.0})
    writer.close()
    mirror.close()
    lines = read_segments(open_folder(remote))
    assert [(x["step"], x.get("loss/total")) for x in lines] == [(1, 1.0), (2, 1.0), (3, 2.0)]
    assert lines == read_metrics(tmp_path)


@pytest.mark.parametrize("seed", range(4))
def test_an_unreliable_store_loses_and_duplicates_nothing(tmp_path, monkeypatch, seed):
    monkeypatch.setattr("utils.storage.retry._FIRST_WAIT_S", 0.0)
    faulty = register(seed)
    remote, draws, done = "faulty://bucket/a", random.Random(seed), 0
    for number in range(6):
        folder = tmp_path / str(number)
        pull(folder, remote)
        until = done + 25
        attempt(folder, remote, from_step=done, to_step=until)
        # The next one goes on from an earlier checkpoint.
        done = until - draws.randrange(6)
    lines = read_segments(open_folder(remote))
    assert [line["step"] for line in lines] == list(range(1, until + 1))
    assert all(line["loss/total"] == line["step"] / 7 for line in lines)
    assert len(faulty.faults) > 5


def test_an_unreachable_store_is_caught_up_once_it_returns(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("utils.storage.retry._FIRST_WAIT_S", 0.0)
    faulty = register(every=1)
    monkeypatch.setattr("tests.support.faulty.FAULTS", ("refused",))
    mirror = Mirror(tmp_path, "faulty://bucket/a", 1, from_step=0)
    writer = MetricWriter(tmp_path, attempt=1, mirror=mirror)
    writer.write(1, "train", {"loss/total": 1.0})
    with pytest.raises(StorageError, match="Connection reset"):
        writer.sync()
    writer.write(2, "train", {"loss/total": 2.0})
    faulty.every = 10**9
    writer.sync()
    mirror.close()
    assert [line["step"] for line in read_segments(open_folder("faulty://bucket/a"))] == [1, 2]


def test_a_deleted_segment_is_reported(tmp_path, caplog):
    remote = f"memory://{uuid.uuid4().hex}/a"
    attempt(tmp_path, remote, from_step=0, to_step=12)
    open_folder(remote).child("metrics").remove_file("a001-000001.jsonl")
    assert [line["step"] for line in read_segments(open_folder(remote))] == [1, 2, 3, 4, 5, 11, 12]
    assert "segments of attempt 1 are missing" in caplog.text


def test_an_attempt_without_an_end_counts_as_killed_and_torn_lines_hide_nothing(tmp_path):
    assert begin_attempt(tmp_path, 0, {"device": "cpu"}) == 1
    with (tmp_path / "attempts.jsonl").open("a") as file:
        file.write('{"attempt": 1, "ended": 12')
    assert begin_attempt(tmp_path, 4, {}) == 2
    end_attempt(tmp_path, 2, 9, "preempted", "asked to end")
    first, second = read_attempts(tmp_path)
    assert "ended" not in first and first["hardware"] == {"device": "cpu"}
    assert (second["from_step"], second["to_step"], second["status"]) == (4, 9, "preempted")
    assert second["began"] <= second["ended"]


def test_artifacts_are_listed_with_the_checksums_that_the_store_keeps(tmp_path):
    remote = f"memory://{uuid.uuid4().hex}/a"
    (tmp_path / "student.safetensors").write_bytes(b"weights" * 1000)
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "trace.json").write_text("{}")
    for name in ("run.json", "run.lock", "attempts.jsonl", "x.tmp"):
        (tmp_path / name).write_text("{}")
    found = publish_artifacts(tmp_path, remote)
    assert [(one["path"], one["kind"]) for one in found] == [
        ("profile/trace.json", "trace"),
        ("student.safetensors", "weights"),
    ]
    folder = open_folder(remote)
    for one in found:
        assert int(one["crc32c"], 16) == compute_crc32c(tmp_path / one["path"])
        assert int(one["crc32c"], 16) == folder.get_checksum(one["path"])
    assert json.loads(folder.read_text("artifacts.json"))["artifacts"] == found


def test_another_machine_continues_from_the_bucket_alone(tmp_path):
    """The first one is lost after step 13; its checkpoint of step 10 is gone on from."""
    remote, wanted = f"memory://{uuid.uuid4().hex}/a", QuantileWriter(0.01, 0)
    for step in range(1, 18):
        wanted.add("step_s", step / 7)
    wanted.cut(17)
    for name, first, last in (("one", 0, 13), ("two", 10, 17)):
        folder = tmp_path / name
        if first:
            pull(folder, remote)
        folder.mkdir(exist_ok=True)
        mirror = Mirror(folder, remote, 1 + bool(first), from_step=first)
        keeper, spans = QuantileWriter(0.01, first, folder), SpanWriter(folder, 1 + bool(first))
        for step in range(first + 1, last + 1):
            keeper.add("step_s", step / 7)
            spans.add("step", step, 1.0 * step, 0.5)
            if step % 5 == 0:
                spans.flush()
                keeper.cut(step)
                keeper.save(step, ())
                mirror.flush()
        if first:
            spans.close()
            keeper.write(last)
            mirror.close()
    texts = open_folder(remote).read_texts([SKETCHES_FILE, SPANS_FILE])
    found = parse_sketches(texts[SKETCHES_FILE])
    assert found.from_step == 0
    assert str(found.merge()["step_s"]) == str(wanted.sketches.merge()["step_s"])
    steps = [(span.attempt, span.step) for span in parse_spans(texts[SPANS_FILE])]
    assert steps == [(1, step) for step in range(1, 11)] + [(2, step) for step in range(11, 18)]
