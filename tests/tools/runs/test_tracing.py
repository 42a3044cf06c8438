"""`trace`: what Perfetto gets, parsed back with its own protos."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos

from store.record.attempts import begin_attempt, end_attempt
from store.record.spans import SpanWriter
from tests.support.stored_runs import make_run

Found = dict[tuple[str, ...], list[tuple[str, float, float]]]


def read(path: Path) -> tuple[Found, dict[str, list[float]]]:
    """Track -> its slices (name, began, ended), with brackets that close; counter -> its values."""
    trace = protos.Trace()
    trace.ParseFromString(path.read_bytes())
    tracks: dict[int, tuple[str, ...]] = {0: ()}
    slices, open_slices, counters = {}, {}, {}
    for packet in trace.packet:
        if packet.HasField("track_descriptor"):
            told = packet.track_descriptor
            tracks[told.uuid] = (*tracks[told.parent_uuid], told.name)
            continue
        event, time = packet.track_event, packet.timestamp / 1e9
        track = tracks[event.track_uuid][1:]
        if event.type == protos.TrackEvent.TYPE_SLICE_BEGIN:
            assert track not in open_slices
            open_slices[track] = event.name, time
        elif event.type == protos.TrackEvent.TYPE_SLICE_END:
            name, began = open_slices.pop(track)
            slices.setdefault(track, []).append((name, began, time))
        else:
            counters.setdefault(track[-1], []).append(event.double_counter_value)
    assert not open_slices
    return slices, counters


@pytest.fixture
def long_run(root: Path) -> Path:
    return make_long(root, 1_000_000, 50)


def make_long(root: Path, steps: int, every: int) -> Path:
    """Two attempts with a pause between them, windows and lines as the trainer writes them."""
    lines = [
        {
            "step": step,
            "kind": "train",
            "attempt": 1 + (step > steps // 2),
            "time_s": step * 0.1,
            "loss/total": 3.0 / (1 + step),
            "img_per_s": 100.0 + step % 7,
            "graphs": 3,
            "host_reads": 0,
            "host_rss_gib": 1.0,
            "input_wait_s": 0.01,
        }
        for step in range(every, steps + 1, every)
    ]
    run = make_run(root, "long", lines=lines)
    (run.path / "attempts.jsonl").unlink()
    for attempt, first in ((1, 0), (2, steps // 2)):
        assert begin_attempt(run.path, first, {}) == attempt
        writer = SpanWriter(run.path, attempt)
        began = 1.79e9 + attempt * steps
        for step in range(first + 1, first + 200):
            writer.add("input", step, began + step * 0.1, 0.01)
            writer.add("step", step, began + step * 0.1 + 0.01, 0.09)
        for step in range(first + every, first + steps // 2 + 1, every):
            at = began + step * 0.1
            sums = {"count": every, "step_s": 0.09 * every, "input_wait_s": 0.01 * every}
            writer.add("window", step, at, 0.1 * every, **sums)
            if step % (steps // 100) == 0:
                writer.add("evaluation", step, at, 3.0)
                writer.add("checkpoint_write", step, at + 1.0, 5.0)
        writer.close()
        end_attempt(run.path, attempt, first + steps // 2, "complete")
    text = (run.path / "attempts.jsonl").read_text().splitlines()
    told = [json.loads(line) for line in text]
    for one in told:
        began = 1.79e9 + one["attempt"] * steps
        one |= {"began": began} if "began" in one else {"ended": began + 0.09 * steps}
    (run.path / "attempts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in told))
    return run.path


def test_a_million_steps_stay_below_ten_megabytes(ask, long_run, tmp_path):
    out = tmp_path / "long.perfetto-trace"
    code, text, _ = ask("trace", "long", "--out", str(out), "--json")
    assert code == 0
    told = json.loads(text)
    assert told["bytes"] == out.stat().st_size < 10e6
    slices, counters = read(out)
    assert sum(map(len, slices.values())) == told["slices"]
    assert sum(map(len, counters.values())) == told["points"]
    names = [name for name, *_ in slices[("run",)]]
    assert names == ["attempt 1", "down", "attempt 2"]
    (_, _, ended), (_, down, up), (_, began, _) = slices[("run",)]
    assert (down, up) == (ended, began)
    rank = ("attempt 2", "rank 0")
    assert len(slices[(*rank, "step")]) == len(slices[(*rank, "input wait")]) == 199
    assert len(slices[(*rank, "evaluation")]) == len(slices[(*rank, "checkpoint write")]) == 50
    assert set(counters) == {"loss/total", "img_per_s", "graphs", "host_reads", "host_rss_gib"}
    assert max(counters["loss/total"]) == 3.0 / 51


@pytest.mark.slow
def test_a_million_windows_stay_below_ten_megabytes(ask, root, tmp_path):
    make_long(root, 1_000_000, 1)
    out = tmp_path / "long.perfetto-trace"
    assert ask("trace", "long", "--out", str(out))[0] == 0
    assert out.stat().st_size < 10e6
    slices, _ = read(out)
    windows = [one for track, found in slices.items() if "window" in track for one in found]
    assert 10_000 <= len(windows) <= 20_002


def test_chrome_traces_of_an_older_run_are_written(ask, root, tmp_path):
    out = tmp_path / "old.json"
    code, text, _ = ask("trace", "run1", "--out", str(out), "--format", "chrome", "--json")
    events = json.loads(out.read_text())["traceEvents"]
    told = json.loads(text)
    assert code == 0 and told["slices"] == sum(event["ph"] == "X" for event in events) == 5
    assert told["points"] == sum(event["ph"] == "C" for event in events) == 8
    assert {event["name"] for event in events if event["ph"] == "X"} == {"attempt 1", "window"}


def test_a_run_of_version_1_is_drawn_with_its_numbers(ask, root, tmp_path):
    lines = [{"step": step, "time_s": 2.0 * step, "total": 1.0 / step} for step in (1, 2, 3)]
    began = {"started": 1.79e9, "ended": 1.79e9 + 10.0}
    run = make_run(root, "first", lines=lines, final={"eval_top1": 1.0}, **began)
    (run.path / "attempts.jsonl").unlink()
    out = tmp_path / "first.perfetto-trace"
    assert ask("trace", "first", "--out", str(out))[0] == 0
    slices, counters = read(out)
    assert counters["loss/total"] == [1.0, 0.5, 1.0 / 3]
    (windows,) = (found for track, found in slices.items() if "window" in track)
    assert [end - 1.79e9 for _, _, end in windows] == pytest.approx([2.0, 4.0, 6.0])
    assert "goodput 60.0% of 10.0 s paid for" in ask("show", "first")[1]


def test_wrong_use_gives_one_line_and_writes_nothing(ask, root, tmp_path):
    (root / "digits" / "run0" / "attempts.jsonl").unlink()
    for run, out, word in (
        ("run0", tmp_path / "x", "has no times"),
        ("run1", tmp_path / "no" / "x", "--out"),
        ("run1", tmp_path, "--out"),
        ("run7", tmp_path / "x", "run7"),
    ):
        code, text, error = ask("trace", run, "--out", str(out))
        assert (code, text, error.count("\n")) == (2, "", 1) and word in error
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("cache", "runs")] == []


def test_show_prints_where_the_time_went(ask, root):
    make_long(root, 1000, 10)
    code, text, _ = ask("show", "long")
    assert code == 0
    assert "goodput 50.0% of 3 min 00 s paid for" in text
    time = json.loads(ask("show", "long", "--json")[1])["time"]
    assert time["of"] == "spans" and time["goodput"] == pytest.approx(90 / 180)
    assert time["shares_s"]["step"] == pytest.approx(90) and time["shares_s"]["down"] > 900
