"""Where the time of a run went: shares that add up, and one goodput."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from store.quality.costs import compute_cost
from store.query.record import RunRecord
from store.query.timeline import (
    compute_time,
    describe_steps,
    list_attempts,
    list_downs,
    make_windows,
)
from store.query.trace import make_trace, thin
from store.record.artifacts import publish_artifacts
from store.record.spans import SPANS_FILE
from store.record.summary import write_summary
from tests.support.stored_runs import make_run
from tools.runs.__main__ import main

START = 1_790_000_000.0


def make(
    root: Path, attempts: list[tuple[int, float, float | None]], spans: list[tuple]
) -> RunRecord:
    """A run of attempts (from_step, began, ended) and spans (attempt, name, step, began, seconds).

    Further entries of a span are its count, step_s and input_wait_s; times are seconds from 0 on.
    """
    run = make_run(root, "a")
    text = ""
    for number, (from_step, began, ended) in enumerate(attempts, start=1):
        start = {"attempt": number, "host": "vm", "pid": 1, "began": START + began}
        text += json.dumps({**start, "from_step": from_step, "hardware": {}}) + "\n"
        if ended is not None:
            end = {"attempt": number, "ended": START + ended, "to_step": 9, "status": "preempted"}
            text += json.dumps(end) + "\n"
    (run.path / "attempts.jsonl").write_text(text)
    names = ("attempt", "name", "step", "began", "duration_s", "count", "step_s", "input_wait_s")
    lines = [dict(zip(names, span, strict=False)) for span in spans]
    for line in lines:
        line["began"] += START
    (run.path / SPANS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RunRecord(run.path)


# Ten seconds of set-up; steps 1 to 10 of 4 s, of which 5 s were compiling, and 1 s of waiting.
FIRST = [
    (1, "compile", 1, 10.0, 5.0, 2),
    (1, "window", 10, 10.0, 50.0, 10, 40.0, 10.0),
    (1, "evaluation", 10, 60.0, 8.0),
    (1, "compile", 10, 61.0, 3.0, 1),
    (1, "checkpoint_held", 10, 68.0, 2.0),
    (1, "checkpoint_write", 10, 69.0, 9.0),
]


def test_a_killed_attempts_last_step_is_that_of_its_last_line_or_span(tmp_path):
    spans = [(1, "window", 10, 10.0, 50.0, 10, 40.0, 10.0), (2, "compile", 9, 91.0, 1.0, 1)]
    record = make(tmp_path, [(0, 0.0, None), (8, 90.0, None), (9, 95.0, 99.0)], spans)
    told = [describe_steps(record, attempt) for attempt in record.attempts]
    assert told == ["0 to ≥ 10", "8 to ≥ 9", "9 to 9"]
    (tmp_path / "other").mkdir()
    silent = make(tmp_path / "other", [(0, 0.0, None), (0, 90.0, None)], [])
    assert describe_steps(silent, silent.attempts[1]) == "0 to ?"


def test_shares_add_up_and_each_second_counts_once(tmp_path):
    time = compute_time(make(tmp_path, [(0, 0.0, 80.0)], FIRST))
    assert time.shares_s == pytest.approx(
        {
            "step": 35.0,
            "input_wait": 10.0,
            "compile": 8.0,
            "evaluation": 5.0,
            "checkpoint": 2.0,
            "redone": 0.0,
            "other": 20.0,
            "down": 0.0,
        }
    )
    assert (time.paid_s, time.is_least, time.has_spans) == (80.0, False, True)
    assert time.goodput == pytest.approx(35 / 80)


def test_steps_repeated_by_a_later_attempt_are_not_useful(tmp_path):
    """Killed after step 18, went on from step 15: of the second window three of eight are lost."""
    spans = [
        *FIRST,
        (1, "window", 18, 70.0, 10.0, 8, 8.0, 1.6),
        (2, "window", 20, 105.0, 12.0, 5, 10.0, 2.0),
    ]
    record = make(tmp_path, [(0, 0.0, None), (15, 100.0, 120.0)], spans)
    time = compute_time(record)
    assert time.shares_s["redone"] == pytest.approx(3 / 8 * 9.6)
    assert time.shares_s["step"] == pytest.approx(35 + 5 / 8 * 8 + 10)
    assert time.shares_s["input_wait"] == pytest.approx(10 + 5 / 8 * 1.6 + 2)
    # Its last sign of life was the end of that window.
    assert [(one.ended - START, one.is_whole) for one in list_attempts(record)] == [
        (80.0, False),
        (120.0, True),
    ]
    assert list_downs(list_attempts(record)) == [(START + 80.0, START + 100.0)]
    assert (time.paid_s, time.shares_s["down"], time.is_least) == (100.0, 20.0, True)
    assert sum(time.shares_s.values()) == pytest.approx(120.0)
    assert time.goodput == pytest.approx(50 / 100)


def test_steps_undone_by_a_rollback_are_not_useful(tmp_path):
    spans = [
        (1, "window", 4, 0.0, 4.0, 4, 4.0, 0.0),
        (1, "window", 8, 4.0, 4.0, 4, 4.0, 0.0),
        (1, "rollback", 6, 8.0, 1.5, 2),
        (1, "window", 8, 10.0, 1.0, 1, 1.0, 0.0),
    ]
    time = compute_time(make(tmp_path, [(0, 0.0, 12.0)], spans))
    assert time.shares_s["redone"] == pytest.approx(1.5 + 2.0)
    assert time.shares_s["step"] == pytest.approx(4 + 2 + 1)


def test_costs_and_timeline_report_the_same_goodput(tmp_path):
    record = make(tmp_path, [(0, 0.0, 80.0), (10, 90.0, 100.0)], FIRST)
    cost, time = compute_cost(record, []), compute_time(record)
    assert (cost.goodput, cost.paid_s) == (time.goodput, time.paid_s) == (35 / 90, 90.0)


def test_a_run_without_spans_is_described_by_its_lines(tmp_path):
    record = make(tmp_path, [(0, 0.0, 10.0)], [])
    time = compute_time(record)
    assert not time.has_spans
    assert time.shares_s["step"] == pytest.approx(0.4)
    assert [(span.step, span.count) for span in make_windows(record, list_attempts(record))] == [
        (1, 1),
        (2, 1),
        (3, 1),
        (4, 1),
    ]
    trace = make_trace(record)
    assert {one.name for one in trace.slices} == {"attempt 1", "window"}
    assert {one.name for one in trace.counters} == {"img_per_s", "loss/total"}
    (record.folder.path / "attempts.jsonl").unlink()
    nothing = compute_time(RunRecord(record.folder.path))
    assert (nothing.paid_s, nothing.goodput) == (None, None)


def test_a_thinned_counter_keeps_its_spikes():
    points = [(float(i), 1.0) for i in range(100_001)]
    points[77_777] = (77_777.0, 9.0)
    points[5] = (5.0, -9.0)
    found = thin(points)
    assert len(found) <= 10_000
    assert {(77_777.0, 9.0), (5.0, -9.0)} <= set(found)
    assert found == sorted(found)


def test_every_report_gives_the_same_time_of_a_killed_attempt(tmp_path, capsys):
    attempts = [
        {"attempt": 1, "host": "vm", "pid": 1, "began": START, "from_step": 0},
        {"attempt": 2, "host": "vm", "pid": 2, "began": START + 100.0, "from_step": 2},
        {"attempt": 2, "ended": START + 120.0, "to_step": 4, "status": "complete"},
    ]
    lines = [
        {"step": step, "kind": "train", "attempt": 1 + step // 3, "time_s": 10.0 * step}
        for step in range(1, 5)
    ]
    run = make_run(tmp_path, "killed", lines=lines, final={"eval_top1": 1.0}, attempts=2)
    text = "".join(json.dumps(one) + "\n" for one in attempts)
    (run.path / "attempts.jsonl").write_text(text)
    publish_artifacts(run.path)
    write_summary(run.path, [])
    counts = json.loads((run.path / "summary.json").read_text())["counts"]
    assert (counts["wall_s"], counts["killed"]) == (40.0, 1)
    assert main(["show", f"--store={tmp_path}", "killed", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["worked_s"] == told["time"]["paid_s"] == 40.0
    assert main(["show", f"--store={tmp_path}", "killed"]) == 0
    shown = capsys.readouterr().out
    assert "≥ 40.0 s, attempts: 2" in shown and "≥ 20.0 s" in shown
    assert "killed" in shown and "at work" not in shown
