"""Curves for charts, however large, torn or unusual the history is."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from service.web.series import columns as columns_module
from service.web.series.columns import gather_chunk, parse_chunk
from service.web.series.ranges import Extent, SeriesReader, smooth_values, thin_out
from store.query.record import RunRecord, read_history
from store.record.history import METRICS_FILE, write_lines
from tests.support.stored_runs import make_lines, make_run
from utils.errors import UserError


@pytest.fixture
def reader(tmp_path):
    return SeriesReader(tmp_path / "cache")


def make_record(root, lines):
    return RunRecord(make_run(root / "runs", "one", lines=lines).path)


def append(record, lines):
    with (record.folder.path / METRICS_FILE).open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


def read(reader, record, name="train.loss/total", **options):
    return reader.read(record, [name], Extent(**options)).curves[0]


def test_a_short_history_is_returned_completely(reader, tmp_path):
    lines = make_lines(50)
    curve = read(reader, make_record(tmp_path, lines), width=100)
    assert curve.steps == list(range(1, 51))
    assert curve.values == pytest.approx([line["loss/total"] for line in lines[:50]], rel=1e-5)
    assert (curve.points, curve.unit, curve.direction) == (50, "", "lower")


@pytest.mark.parametrize("seed", range(8))
def test_a_spike_of_one_step_is_visible_at_every_zoom(seed):
    draws = np.random.default_rng(seed)
    steps = np.arange(100_000)
    values = draws.normal(size=len(steps))
    place = int(draws.integers(len(steps)))
    values[place] = 60.0 if seed % 2 else -60.0
    low, high, width = 0, len(steps), int(draws.integers(16, 900))
    while high - low > 4:
        curve = thin_out("train.loss/total", steps[low:high], values[low:high], width)
        assert len(curve.steps) <= 2 * width
        assert dict(zip(curve.steps, curve.values, strict=True))[place] == values[place]
        low, high = (low + place + 1) // 2, (high + place + 1) // 2


def test_each_pixel_column_keeps_its_minimum_and_maximum():
    steps, values = np.arange(40_000), np.random.default_rng(0).normal(size=40_000)
    curve = thin_out("train.lr", steps, values, 500)
    shown = dict(zip(curve.steps, curve.values, strict=True))
    for column in range(250):
        part = slice(column * 160, (column + 1) * 160)
        inner = [shown[step] for step in range(part.start, part.stop) if step in shown]
        assert min(inner) == pytest.approx(values[part].min(), rel=1e-5)
        assert max(inner) == pytest.approx(values[part].max(), rel=1e-5)


def test_non_finite_points_are_counted_by_kind(reader, tmp_path):
    lines = make_lines(3000)
    for row, word in ((10, "nan"), (1000, "inf"), (2000, "-inf")):
        lines[row] |= {"grad_norm": None, "nonfinite": {"grad_norm": word}}
    curve = read(reader, make_record(tmp_path, lines), "train.grad_norm", width=64)
    assert curve.nonfinite == {"nan": [11], "inf": [1001], "-inf": [2001]}
    assert curve.nonfinite_count == {"nan": 1, "inf": 1, "-inf": 1}
    assert all(map(math.isfinite, curve.values))
    assert len(curve.steps) + 3 <= 128


def test_a_history_without_finite_values_has_only_markers(reader, tmp_path):
    lines = [
        {"step": step, "kind": "train", "loss/total": None, "nonfinite": {"loss/total": "nan"}}
        for step in range(1, 5001)
    ]
    curve = read(reader, make_record(tmp_path, lines), width=80)
    assert curve.steps == []
    assert curve.nonfinite_count == {"nan": 5000}
    assert curve.nonfinite["nan"][0] == 1
    assert len(curve.nonfinite["nan"]) == 10


def test_a_range_includes_one_point_beyond_each_edge(reader, tmp_path):
    record = make_record(tmp_path, make_lines(100, every=10))
    assert read(reader, record, start=35, end=62).steps == [30, 40, 50, 60, 70]
    answer = reader.read(record, ["train.loss/total"], Extent(35, 62))
    assert (answer.first, answer.last) == (10, 100)


def test_numbers_that_differ_in_their_last_digits_stay_distinct():
    values = 2.302585 + np.arange(100) * 1e-9
    curve = thin_out("train.lr", np.arange(100), values, 100)
    assert len(set(curve.values)) == 100


def test_a_growing_history_is_followed(reader, tmp_path):
    record = make_record(tmp_path, make_lines(10))
    assert len(read(reader, record).steps) == 10
    more = make_lines(20)[10:]
    with (record.folder.path / METRICS_FILE).open("a") as file:
        file.write(json.dumps(more[0]) + "\n" + json.dumps(more[1])[:20])
    assert read(reader, record).steps == list(range(1, 12))
    with (record.folder.path / METRICS_FILE).open("a") as file:
        file.write(json.dumps(more[1])[20:] + "\n")
    assert read(reader, record).steps == list(range(1, 13))


def test_a_rollback_drops_points_already_read(reader, tmp_path):
    record = make_record(tmp_path, make_lines(40))
    assert read(reader, record).values[-1] == pytest.approx(2 / math.sqrt(40), rel=1e-5)
    write_lines(record.folder.path, make_lines(20))
    assert len(read(reader, record).steps) == 20
    write_lines(record.folder.path, make_lines(60, start=3.0))
    assert read(reader, record).values[0] == pytest.approx(3.0)


def test_a_large_history_is_mapped_from_a_growing_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(columns_module, "_LARGE_BYTES", 1000)
    monkeypatch.setattr(columns_module, "_READ_BYTES", 4000)
    record = make_record(tmp_path, make_lines(200))
    whole = read(SeriesReader(tmp_path / "cache"), record, width=400)
    assert list((tmp_path / "cache").glob("*/g*/train-0000.f64"))
    lines = [{**line, "mse": 1.0} for line in make_lines(300)[200:]]
    append(record, lines)
    again = SeriesReader(tmp_path / "cache")
    monkeypatch.setattr(columns_module, "parse_chunk", lambda text: parse_chunk(check(text)))

    def check(text):
        assert b'"step": 1,' not in text, "what the cache has is read again"
        return text

    curve = read(again, record, width=400)
    assert curve.steps == list(range(1, 301))
    assert curve.values[:200] == whole.values
    assert read(again, record, "train.mse", width=400).steps == list(range(201, 301))
    assert read(again, record, "eval.top1").steps == [200, 300]


@pytest.mark.parametrize("fault", ["emptied", "state", "column", "unwritable"])
def test_a_damaged_cache_costs_only_time(tmp_path, monkeypatch, fault):
    monkeypatch.setattr(columns_module, "_LARGE_BYTES", 1000)
    record = make_record(tmp_path, make_lines(100))
    cache = tmp_path / "cache"
    if fault == "unwritable":
        cache.write_text("no folder")
    first = read(SeriesReader(cache), record)
    for path in cache.rglob("*"):
        if fault == "emptied" and path.is_file():
            path.unlink()
        elif fault == "state" and path.name == "state.json":
            path.write_text(path.read_text()[:-7])
        elif fault == "column" and path.name == "train-0001.f64":
            path.write_bytes(b"")
    assert read(SeriesReader(cache), record) == first


ODD = {
    "no kind": '{"step": 1, "total": 2.0}\n{"step": 2, "total": null}',
    "null without a word": '{"step": 1, "kind": "train", "lr": null}',
    "damaged": '{"step": 1, "kind": "train", "lr": 1.0}\n{"step": 2, "ki\n[1]\n{"step": "3"}',
    "bare nan": '{"step": 1, "kind": "train", "lr": NaN, "grad_norm": -Infinity}',
    "text": '{"step": 1, "kind": "train", "lr": "0.1", "grad_norm": true, "a": [1]}',
    "whole, then broken numbers": '{"step": 1, "kind": "train", "lr": 1}\n'
    '{"step": 2, "kind": "eval", "lr": 1.5, "top1": 3}',
    "told": '{"step": 1, "kind": "train", "lr": null, "b": null, "nonfinite": '
    '{"lr": "-inf", "b": "nan"}}\n{"step": 2, "kind": "train", "c": 1.0}',
}


@pytest.mark.parametrize("text", ODD.values(), ids=ODD.keys())
def test_fast_and_slow_parsing_give_the_same_bits(text):
    fast, slow = parse_chunk(text.encode() + b"\n"), gather_chunk(read_history(text))
    assert fast.keys() == slow.keys()
    for kind, columns in slow.items():
        assert fast[kind].keys() == columns.keys()
        for name, values in columns.items():
            np.testing.assert_array_equal(
                np.asarray(fast[kind][name]).view(np.int64), np.asarray(values).view(np.int64)
            )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metrics": ["train.loss/totl"]}, "did you mean 'train.loss/total'"),
        ({"metrics": []}, "0 numbers are requested"),
        ({"metrics": ["train.lr"], "width": 3}, "width (3)"),
        ({"metrics": ["train.lr"], "start": 5, "end": 4}, "start (5) is after end (4)"),
    ],
)
def test_an_invalid_query_is_refused_in_one_sentence(reader, tmp_path, options, words):
    options = dict(options)
    record = make_record(tmp_path, make_lines(5))
    with pytest.raises(UserError, match=r"\A[^\n]*\Z") as caught:
        metrics = options.pop("metrics")
        reader.read(record, metrics, Extent(**options))
    assert words in str(caught.value)


def test_a_run_without_a_history_has_no_numbers(reader, tmp_path):
    record = make_record(tmp_path, make_lines(5))
    (record.folder.path / METRICS_FILE).unlink()
    assert reader.list_metrics(record) == []


def test_metrics_of_training_come_first(reader, tmp_path):
    names = reader.list_metrics(make_record(tmp_path, make_lines(5)))
    assert names[0] == "train.loss/total"
    assert names[-2:] == ["eval.top1", "eval.loss"]


def test_curves_can_be_plotted_and_cut_by_epoch_and_time(reader, tmp_path):
    lines = [
        {
            "step": step,
            "kind": "train",
            "attempt": 1,
            "loss/total": 1.0 / step,
            "epoch": step / 4,
            "time_s": step * 0.5,
        }
        for step in range(2, 41, 2)
    ]
    lines[4]["loss/total"], lines[4]["nonfinite"] = None, {"loss/total": "nan"}
    lines += [{"step": step, "kind": "eval", "attempt": 1, "top1": 50.0} for step in (1, 20, 40)]
    record = make_record(tmp_path, lines)
    curve = read(reader, record, axis="time")
    assert curve.x == [step * 0.5 for step in curve.steps]
    assert curve.nonfinite_x == {"nan": [5.0]}
    # Evaluations lie between lines of training; the run began at 0.
    assert read(reader, record, "eval.top1", axis="epoch").x == [0.25, 5.0, 10.0]
    part = read(reader, record, axis="epoch", start=5.0, end=7.5)
    assert part.steps[0] <= 20 and part.steps[-1] >= 30 and len(part.steps) <= 8
    assert read(reader, record).x == []


def test_a_run_without_a_clock_has_no_time_axis(reader, tmp_path):
    lines = [{"step": 1, "kind": "train", "attempt": 1, "loss/total": 1.0}]
    with pytest.raises(UserError, match=r"x \(time\): .* has no number train.time_s; use step"):
        read(reader, make_record(tmp_path, lines), axis="time")


@pytest.mark.parametrize("window", [2, 5, 100])
def test_smoothing_is_the_mean_over_a_window_of_the_finite_values(window):
    draws = np.random.default_rng(window)
    values = draws.normal(size=60)
    values[[3, 17, 18]] = math.nan, math.inf, -math.inf
    found = smooth_values(values, window)
    for place, value in enumerate(values):
        near = values[max(0, place - window // 2) : place + window // 2 + 1]
        wanted = near[np.isfinite(near)].mean() if np.isfinite(value) else value
        assert found[place] == pytest.approx(wanted, rel=1e-12, abs=1e-12, nan_ok=True)
    assert smooth_values(values, 0) is values
