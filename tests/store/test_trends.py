"""Benchmark reports over time: what forms a series, and when the newest raise an alarm."""

from __future__ import annotations

import copy
import json
import math
import random
import statistics
from itertools import permutations

import pytest

from store.quality.gates import parse_gate
from store.quality.reports import get_identity
from store.quality.trends import (
    check_reports,
    compute_p,
    find_trends,
    gate_newest,
    judge,
    keep_report,
    read_reports,
)
from tools.runs.__main__ import main
from utils.errors import UserError

REPORT = {
    "schema": 2,
    "created": "2026-11-22T10:00:00Z",
    "environment": {"git_commit": "abc-dirty"},
    "config": {"model": {"name": "vit"}, "run": {"run_id": "a"}},
    "settings": {"input": "real"},
    "results": [
        {
            "processes": 1,
            "hardware": "CPU",
            "devices": 1,
            "global_batch_size": 8,
            "unit": "img",
            "img_per_s": 100.0,
            "step_p50_s": 0.08,
            "graphs": 2,
            "img_per_s_repeats": [99.0, 101.0],
            "mfu": None,
        }
    ],
}


LAB = {
    "schema_version": 2,
    "lab": "delta",
    "environment": {"git_commit": "abc"},
    "settings": {
        "on": "v5e",
        "width": 128,
        "chunk": 64,
        "solver": "rows",
        "loop": None,
        "precision": "default",
    },
    "rows": [
        {
            "variant": "gdn",
            "form": "xla",
            "mode": "forward",
            "key_heads": 16,
            "batch": 1,
            "value_heads": 32,
            "tokens": 8192,
            "kind": "bundles",
            "ms": 9.8,
            "peak_bytes": 7e8,
            "mcycles_with_dma": 14.6,
            "mcycles_estimate": 18.7,
            "hbm_bytes": 4e9,
        }
    ],
}


def draw_series(draw: random.Random, count: int, change: float = 0.0) -> list[float]:
    return [draw.gauss(100 * (1 - change), 3.0) for _ in range(count)]


def find_verdict(figure: str, values: list[float], **more: float) -> str:
    return judge(figure, values, **more)[3]


def test_steady_series_raise_an_alarm_once_in_twenty_reports():
    """Every report at which an alarm stands counts."""
    draw = random.Random(2)
    series = draw_series(draw, 523)
    verdicts = [find_verdict("1 x img_per_s", series[end : end + 23]) for end in range(500)]
    assert sum(verdict in ("worse", "much worse") for verdict in verdicts) <= 25


def test_a_slow_down_of_5_percent_under_noise_of_3_is_found_within_three_reports():
    """In 86.7 % of 10,000: a rule that is told the spread finds 88.9 % (docs/store.md)."""
    draw, found = random.Random(3), 0
    for _ in range(150):
        series = draw_series(draw, 22)
        for _ in range(3):
            series += draw_series(draw, 1, change=0.05)
            if find_verdict("1 x img_per_s", series) in ("worse", "much worse"):
                found += 1
                break
    assert found >= 120


def test_trends_handle_direction_outliers_and_short_series():
    steady = [100.0, 101.0, 99.0, 100.5, 99.5, 100.0, 100.2, 99.8]
    assert find_verdict("1 x step_p50_s", [*steady, 60.0, 60.0, 60.0]) == "better"
    assert find_verdict("1 x img_per_s", [*steady, 98.0, 98.0, 98.0]) == "worse"
    assert find_verdict("1 x img_per_s", [*steady, 100.0, 100.1, 50.0]) == "much worse"
    assert find_verdict("1 x img_per_s", steady[:7]) == "too few"
    assert find_verdict("1 x graphs", [2.0] * 12) == "steady"
    assert judge("1 x graphs", [2.0] * 11 + [4.0])[1:] == (
        pytest.approx(1 / 3),
        pytest.approx(1 / 12),
        "much worse",
    )
    # One outlier raises one alarm, not three.
    assert find_verdict("1 x img_per_s", [*steady, 50.0, 100.1, 100.0]) == "steady"


def test_differences_below_the_compilers_noise_are_no_change():
    cycles = [10.0] * 20
    assert find_verdict("estimated_mcycles", [*cycles, 10.4], least=0.05) == "steady"
    assert find_verdict("estimated_mcycles", [*cycles, 10.6], least=0.05) == "much worse"


def test_the_p_value_counts_every_permutation():
    draw = random.Random(4)
    base, newest = draw_series(draw, 5), [*draw_series(draw, 2), 120.0]
    values = [*base, *newest]
    mean, spread = statistics.fmean(values), statistics.pstdev(values)

    def weigh(order: tuple[float, ...]) -> float:
        if (order[-1] - mean) / spread <= 0.5:
            return -math.inf
        return sum(w * one for w, one in zip((0.5, 0.75, 1.0), order[-3:], strict=True))

    told = [weigh(order) >= weigh(tuple(values)) - 1e-9 for order in permutations(values)]
    assert compute_p(base, newest) == pytest.approx(sum(told) / len(told))


def test_reports_of_one_identity_share_a_folder(tmp_path, caplog):
    other = copy.deepcopy(REPORT)
    other["config"]["run"]["run_id"], other["created"] = "b", "2026-11-23T10:00:00Z"
    assert get_identity(other) == get_identity(REPORT)
    changed = copy.deepcopy(REPORT)
    changed["results"][0]["global_batch_size"] = 16
    assert get_identity(changed) != get_identity(REPORT)
    paths = [keep_report(tmp_path, one) for one in (other, REPORT, changed)]
    assert paths[0].name.startswith("2026-11-23T100000Z-abc-dirty-")
    found = read_reports(tmp_path)
    trends = {
        (name, one.figure): one.values for name in found for one in find_trends(name, found[name])
    }
    assert trends[get_identity(REPORT), "1 x img_per_s"] == (100.0, 100.0)
    assert {figure for _, figure in trends} == {"1 x img_per_s", "1 x step_p50_s", "1 x graphs"}
    empty = {**REPORT, "results": []}
    for bad in ({}, {"created": 3}, [], empty, {**REPORT, "schema": 9}, {**REPORT, "results": 3}):
        with pytest.raises(UserError, match="no report"):
            keep_report(tmp_path, bad)
    paths[0].write_text("{")
    told = read_reports(tmp_path)
    assert {name: len(reports) for name, reports in told.items()} == {
        get_identity(REPORT): 1,
        get_identity(changed): 1,
    }
    assert [one for one in caplog.messages if "move it away" in one and str(paths[0]) in one]


def test_reports_of_one_second_are_all_kept_except_duplicates(tmp_path):
    reports = [copy.deepcopy(REPORT) for _ in range(24)]
    for number, report in enumerate(reports):
        report["results"][0]["img_per_s"] = 100.0 + number
    paths = {keep_report(tmp_path, one) for one in [*reports, *reports]}
    assert len(paths) == 24
    found = read_reports(tmp_path)[get_identity(REPORT)]
    assert sorted(one["results"][0]["img_per_s"] for one in found) == [100.0 + i for i in range(24)]
    folder = next(iter(paths)).parent
    old = folder / "2026-11-22T100000Z-abc-dirty.json"
    keep_report(tmp_path, reports[0]).rename(old)
    assert keep_report(tmp_path, reports[0]) == old and len(list(folder.iterdir())) == 24


def test_a_filter_chooses_reports_by_their_configuration(tmp_path, capsys):
    other = copy.deepcopy(REPORT)
    other["config"]["model"]["name"] = "resnet"
    for one in (REPORT, other):
        keep_report(tmp_path, one)
    ask = ["trend", f"--store={tmp_path}", "--json"]
    assert main([*ask, "--filter=model.name=resnet"]) == 0
    told = json.loads(capsys.readouterr().out)["trends"]
    assert {one["identity"] for one in told} == {get_identity(other)}
    assert main([*ask, "--filter=model.nam=resnet"]) == 2
    assert "model.name" in capsys.readouterr().err
    assert main([*ask, "--filter=model.name=x"]) == 2
    assert "no report fits" in capsys.readouterr().err


def test_a_figure_absent_in_the_newest_report_is_missing():
    reports = [copy.deepcopy(REPORT) for _ in range(8)]
    reports[-1]["results"][0]["img_per_s"] = None
    reports[-1]["environment"]["packages"] = {"torch": "3"}
    found = {one.figure: one for one in find_trends("a", reports)}
    assert found["1 x img_per_s"].verdict == "missing"
    assert found["1 x graphs"].verdict == "steady"
    assert found["1 x graphs"].versions == ("torch none to 3",)
    gates = [parse_gate("img_per_s:5:-:major"), parse_gate("graphs:-:0:minor")]
    assert [one.outcome for one in gate_newest(gates, reports)] == ["fail", "pass"]


VERDICT = {
    "schema_version": 3,
    "estimated_mcycles": 10.0,
    "target": "v5e:2x2",
    "chips": 1,
    "examples_per_chip": 8,
    "unit": "img",
    "example": {"images": [8, 8, 3]},
    "model": "vit",
    "memory": {"peak_bytes": 100, "usable_bytes": 200},
    "made": "2026-11-22T10:00:00Z",
    "configuration": {"model": {"name": "vit"}, "run": {"run_id": "a"}},
    "graph": "g",
    "versions": {"libtpu": "0.0.21"},
    "git_commit": "abc",
}


def test_verdicts_form_one_series_across_compilers_but_not_across_steps(tmp_path):
    newer = {**VERDICT, "versions": {"libtpu": "0.0.22"}, "made": "2026-11-23T10:00:00Z"}
    newer["configuration"] = {"model": {"name": "vit"}, "run": {"run_id": "b"}}
    assert get_identity(newer) == get_identity(VERDICT)
    for key, value in (
        ("target", "v6e:2x2"),
        ("chips", 4),
        ("examples_per_chip", 16),
        ("configuration", {"model": {"name": "resnet"}}),
    ):
        assert get_identity({**VERDICT, key: value}) != get_identity(VERDICT)
    for one in (newer, VERDICT):
        keep_report(tmp_path, one)
    (reports,) = read_reports(tmp_path).values()
    trend = next(t for t in find_trends("a", reports) if t.figure == "estimated_mcycles")
    assert trend.values == (10.0, 10.0) and trend.versions == ("libtpu 0.0.21 to 0.0.22",)
    with pytest.raises(UserError, match="compile it again"):
        keep_report(tmp_path, {**VERDICT, "schema_version": 2, "configuration": None})


def test_the_program_stores_reports_and_finds_regressions(tmp_path, capsys):
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
    assert code == 1 and "worse" in out and "too few" in out and "vit on CPU, batch 8" in out
    page = tmp_path / "page.html"
    asked = ["trend", "--store", str(store), "--json", "--html", str(page)]
    assert main(asked) == 1
    said = json.loads(capsys.readouterr().out)
    assert {one["verdict"] for one in said["trends"]} >= {"steady", "much worse"}
    assert "data:image/png" in page.read_text() and "http:" not in page.read_text()
    for gate, expected in (
        ("img_per_s:50:-:major", 0),
        ("img_per_s:5:-:major", 1),
        ("img_per_s:29.9:-:major", 3),
    ):
        assert main([*asked, "--gate", gate]) == expected
    capsys.readouterr()
    for flags, word in (
        (["--gate", "img_per_sec:1:-:major"], "did you mean 'img_per_s'"),
        (["--undecided", "fail"], "needs gates"),
        (["--html", "/"], "--html"),
    ):
        assert main(["trend", "--store", str(store), *flags]) == 2
        error = capsys.readouterr().err
        assert word in error and error.count("\n") == 1
    path.write_text("no JSON")
    assert main(["trend", "--store", str(store), "--add", str(path)]) == 2
    assert len(list((store / "benchmarks").rglob("*.json"))) == 12


def test_every_flipped_bit_of_a_report_is_found(tmp_path):
    path = keep_report(tmp_path, REPORT)
    whole = path.read_bytes()
    assert check_reports(tmp_path) == (1, {})
    for place in range(0, len(whole), 7):
        flipped = bytes([whole[place] ^ 1 << place % 8])
        path.write_bytes(whole[:place] + flipped + whole[place + 1 :])
        count, damaged = check_reports(tmp_path)
        # Blanks between values say nothing.
        assert count == 1 and (list(damaged) == [path] or whole[place : place + 1].isspace())
    path.write_bytes(whole[: len(whole) // 2])
    assert list(check_reports(tmp_path)[1]) == [path] and read_reports(tmp_path) == {}


def create_lab_report(second: int, mcycles: float, **settings: object) -> dict:
    report = copy.deepcopy(LAB)
    report["created"] = f"2026-11-22T10:00:{second:02d}+00:00"
    report["rows"][0]["mcycles_with_dma"] = mcycles
    report["settings"] |= settings
    return report


def test_lab_cycles_have_a_trend_over_commits(tmp_path, capsys):
    figure = "gdn xla forward 16/32 1x8192 x bundles_mcycles"
    for second in range(10):
        keep_report(tmp_path, create_lab_report(second, 14.6 if second < 9 else 14.9))
    ((identity, reports),) = read_reports(tmp_path).items()
    trends = {one.figure: one for one in find_trends(identity, reports)}
    assert trends[figure].values == (*[14.6] * 9, 14.9) and trends[figure].verdict == "steady"
    assert not any(name.endswith(" x ms") for name in trends)
    assert main(["trend", "--store", str(tmp_path), "--filter", "on=v5e", "--json"]) == 0
    keep_report(tmp_path, create_lab_report(11, 20.0))
    assert main(["trend", "--store", str(tmp_path), "--json"]) == 1
    assert "lab of delta rules on v5e: gdn" in capsys.readouterr().out
    # Another chunk, or another grid, is another series; a row that failed is missing.
    other = create_lab_report(12, 5.0, chunk=32)
    assert get_identity(other) != identity
    failed = create_lab_report(13, 0.0)
    failed["rows"][0] = {
        k: v
        for k, v in failed["rows"][0].items()
        if k in ("variant", "form", "mode", "key_heads", "value_heads", "batch", "tokens")
    }
    assert get_identity(failed) == identity
    told = {one.figure: one.verdict for one in find_trends(identity, [*reports, failed])}
    assert told[figure] == "missing"
