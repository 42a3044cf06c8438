"""`spans.jsonl`: torn ends, failing disks, threads, and what readers leave out."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from store.query.schemas import SpanLine
from store.record.spans import SPANS_FILE, Span, SpanWriter, parse_spans


def read(folder: Path) -> list[Span]:
    return parse_spans((folder / SPANS_FILE).read_text())


def test_spans_are_read_back_unchanged_and_match_the_schema(tmp_path):
    writer = SpanWriter(tmp_path, 3)
    writer.add("step", 7, 1.79e9, 0.25)
    writer.add("window", 8, 1.79e9 + 1, 0.5, count=4, step_s=0.375, input_wait_s=0.125)
    writer.close()
    assert read(tmp_path) == [
        Span("step", 7, 1.79e9, 0.25, 0, 3),
        Span("window", 8, 1.79e9 + 1, 0.5, 0, 3, 4, 0.375, 0.125),
    ]
    for line in (tmp_path / SPANS_FILE).read_text().splitlines():
        SpanLine.model_validate(json.loads(line))


def test_a_torn_last_line_is_removed_before_the_next(tmp_path):
    writer = SpanWriter(tmp_path, 1)
    for step in range(1, 9):
        writer.add("step", step, 1.0 * step, 0.5)
    writer.close()
    path = tmp_path / SPANS_FILE
    whole = path.read_bytes()
    second_last = whole[:-1].rfind(b"\n") + 1
    for size in range(second_last + 1, len(whole)):
        path.write_bytes(whole[:size])
        again = SpanWriter(tmp_path, 2)
        again.add("step", 9, 9.0, 0.5)
        again.close()
        assert [span.step for span in read(tmp_path)] == [*range(1, 8), 9]
    path.write_bytes(b'{"name": "st')
    SpanWriter(tmp_path, 2).close()
    assert path.read_bytes() == b""


def test_invalid_lines_are_left_out():
    lines = [
        '{"name": "step"}',
        "[1]",
        "{",
        '{"name": 3, "began": 1.0, "step": 1}',
        '{"name": "step", "began": "x", "step": 1}',
        '{"name": "step", "began": 1, "step": 2}',
        '{"name": "step", "began": 1, "step": 2.5}',
    ]
    assert parse_spans("\n".join(lines)) == [Span("step", 2, 1, 0.0)]


def test_a_failing_disk_is_reported_once_and_stops_nothing(tmp_path, caplog):
    (tmp_path / SPANS_FILE).symlink_to("/dev/full")
    writer = SpanWriter(tmp_path, 1)
    for _ in range(3):
        writer.add("step", 1, 1.0, 1.0)
        writer.flush()
    writer.close()
    SpanWriter(tmp_path / "nowhere", 1).add("step", 1, 1.0, 1.0)
    assert [record.message.endswith("without spans") for record in caplog.records] == [True, True]


def test_threads_do_not_mix_their_lines(tmp_path):
    writer = SpanWriter(tmp_path, 1)

    def write(step: int) -> None:
        for _ in range(200):
            writer.add("step", step, 1.0, 1.0)
            writer.flush()

    threads = [threading.Thread(target=write, args=(step,)) for step in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    assert sorted(span.step for span in read(tmp_path)) == [1] * 200 + [2] * 200 + [3] * 200
