"""Benchmark reports over time: what is kept together, and when the newest raise an alarm."""

from __future__ import annotations

import copy
import json
import random

import pytest
from scipy import stats

from store.trends import compute_rank_p, get_identity, judge, keep_report, read_trends
from utils.errors import UserError

REPORT = {
    "created": "2026-11-22T10:00:00Z", "environment": {"git_commit": "abc-dirty"},
    "config": {"model": {"name": "vit"}, "run": {"run_id": "a"}}, "settings": {"input": "real"},
    "results": [{"processes": 1, "hardware": "CPU", "devices": 1, "global_batch_size": 8,
                 "unit": "img", "img_per_s": 100.0, "step_p50_s": 0.08, "graphs": 2,
                 "img_per_s_repeats": [99.0, 101.0], "mfu": None}],
}  # fmt: skip


def draw_series(draw: random.Random, count: int, change: float = 0.0) -> list[float]:
    return [draw.gauss(100 * (1 - change), 3.0) for _ in range(count)]


def test_quiet_series_raise_an_alarm_once_in_twenty_reports():
    draw = random.Random(2)
    series = draw_series(draw, 523)
    verdicts = [
        judge("", "1 x img_per_s", series[: end + 23]).verdict for end in range(500)
    ]  # fmt: skip
    alarms = sum(verdict in ("worse", "much worse") for verdict in verdicts)
    assert alarms <= 25


def test_a_slow_down_of_5_percent_under_noise_of_3_is_found_within_three_reports():
    """A test that knew the noise exactly could find 89 % of them at this rate of alarms."""
    draw, found = random.Random(3), 0
    for _ in range(200):
        series = draw_series(draw, 23)
        for _ in range(3):
            series += draw_series(draw, 1, change=0.05)
            if judge("", "1 x img_per_s", series).verdict in ("worse", "much worse"):
                found += 1
                break
    assert found >= 150


def test_direction_outliers_and_short_series():
    steady = [100.0, 101.0, 99.0, 100.5, 99.5, 100.0, 100.2, 99.8]
    assert judge("", "1 x step_p50_s", [*steady, 60.0, 60.0, 60.0]).verdict == "better"
    assert judge("", "1 x img_per_s", [*steady, 60.0, 60.0, 60.0]).verdict == "worse"
    assert judge("", "1 x img_per_s", [*steady, 100.0, 100.1, 50.0]).verdict == "much worse"
    assert judge("", "1 x img_per_s", steady[:7]).verdict == "too few"
    assert judge("", "1 x graphs", [2.0] * 12).verdict == "steady"
    told = judge("", "1 x graphs", [2.0] * 11 + [4.0])
    assert told.verdict == "much worse" and told.worse == pytest.approx(1 / 3)


def test_rank_probabilities_are_those_of_scipy():
    draw = random.Random(4)
    for _ in range(20):
        base, newest = draw_series(draw, 12), draw_series(draw, 3)
        told = stats.mannwhitneyu(newest, base, alternative="greater", method="exact")
        assert compute_rank_p(base, newest) == pytest.approx(told.pvalue)


def test_reports_of_one_identity_lie_together(tmp_path):
    other = copy.deepcopy(REPORT)
    other["config"]["run"]["run_id"], other["created"] = "b", "2026-11-23T10:00:00Z"
    assert get_identity(other) == get_identity(REPORT)
    changed = copy.deepcopy(REPORT)
    changed["results"][0]["global_batch_size"] = 16
    assert get_identity(changed) != get_identity(REPORT)
    paths = [keep_report(tmp_path, one) for one in (other, REPORT, changed)]
    assert paths[0].name == "2026-11-23T100000Z-abc-dirty.json"
    trends = {(one.identity, one.figure): one.values for one in read_trends(tmp_path)}
    assert trends[get_identity(REPORT), "1 x img_per_s"] == (100.0, 100.0)
    assert {figure for _, figure in trends} == {"1 x img_per_s", "1 x step_p50_s", "1 x graphs"}
    for bad in ({}, {"created": 3}, []):
        with pytest.raises(UserError, match="no report"):
            keep_report(tmp_path, bad)
    paths[0].write_text("{")
    with pytest.raises(UserError, match="move it away"):
        read_trends(tmp_path)


def test_the_program_keeps_and_judges(tmp_path, capsys):
    from tools.runs.__main__ import main

    store = tmp_path / "runs"
    store.mkdir()
    assert main(["trend", "--store", str(store)]) == 2
    assert "holds no reports" in capsys.readouterr().err
    for day in range(12):
        report = copy.deepcopy(REPORT)
        report["created"] = f"2026-11-{day + 1:02d}T10:00:00Z"
        report["results"][0]["img_per_s"] = 100 + day % 3 - (30 if day > 8 else 0)
        path = tmp_path / "report.json"
        path.write_text(json.dumps(report))
        code = main(["trend", "--store", str(store), "--add", str(path)])
    out = capsys.readouterr().out
    assert code == 1 and "worse" in out and "too few" in out
    path.write_text("no JSON")
    assert main(["trend", "--store", str(store), "--add", str(path)]) == 2
    assert len(list((store / "benchmarks").rglob("*.json"))) == 12
