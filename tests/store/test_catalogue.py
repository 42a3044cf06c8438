"""The meaning of each number of a line, and lines older than the catalogue."""

from __future__ import annotations

import pytest

from store.record.catalogue import HEAD, LOSS, METRICS, Metric, MetricRegistry
from store.record.history import (
    get_learnt,
    get_loss_terms,
    keep_deterministic,
    modernise,
    read_metrics,
    replay,
)
from tests.support.child_runs import ROOT
from utils.errors import UserError

OLD_RUNS = ROOT / "tests" / "fixtures" / "old_runs"
OLD = {
    "step": 4,
    "attempt": 2,
    "task": 2.5,
    "kd_2": None,
    "total": 1.5,
    "loss": 3.0,
    "lr": 0.1,
    "img_per_s": 80.0,
    "graphs_eval": 1,
    "nonfinite": {"kd_2": "inf"},
}
NEW = {
    "step": 4,
    "kind": "train",
    "attempt": 2,
    "loss/task": 2.5,
    "loss/kd_2": None,
    "loss/total": 1.5,
    "loss/loss": 3.0,
    "lr": 0.1,
    "img_per_s": 80.0,
    "graphs_eval": 1,
    "nonfinite": {"loss/kd_2": "inf"},
}


def test_an_exact_entry_wins_over_a_pattern():
    exact, wide = (Metric(name, "", "none", "clock", "") for name in ("loss/a", "loss/*"))
    catalogue = MetricRegistry(wide, exact)
    assert catalogue.find("loss/a") is exact
    assert catalogue.find("loss/b") is wide
    assert catalogue.find("lossy") is None


def test_a_metric_is_registered_once():
    with pytest.raises(RuntimeError, match="'top1' is already in"):
        METRICS.add(Metric("top1", "%", "higher", "deterministic", "again"))


def test_a_name_without_an_entry_is_refused():
    METRICS.require(["top1", "loss/kd", "tokens_per_s"])
    with pytest.raises(UserError, match="metric 'bleu' is not in the catalogue"):
        METRICS.require(["top1", "bleu"])
    # What a line tells of itself is no number, and no task may write over it.
    for name in HEAD:
        assert METRICS.find(name) is None


@pytest.mark.parametrize("unit", ["img", "tokens", "rows"])
def test_throughput_of_any_unit_is_a_clock_metric(unit):
    assert not METRICS.is_deterministic(f"{unit}_per_s")
    # A part of the loss is none, whatever it is called.
    assert METRICS.is_deterministic(f"{LOSS}{unit}_per_s")


def test_deterministic_fields_exclude_clocks_and_attempts():
    line = {**NEW, "time_s": 3.0, "host_rss_gib": 1.0, "checkpoint_held_s": 0.1, "own": 5.0}
    gone = {"attempt", "img_per_s", "graphs_eval", "time_s", "host_rss_gib", "checkpoint_held_s"}
    assert keep_deterministic(line) == {k: v for k, v in line.items() if k not in gone}


def test_a_line_without_a_kind_is_converted_to_the_current_form():
    assert modernise(OLD) == NEW
    assert modernise(NEW) is NEW
    evaluation = {
        "step": 4,
        "eval_top1": 50.0,
        "eval_loss": None,
        "graphs": 3,
        "graphs_eval": 1,
        "skipped_corrupt": 0,
        "nonfinite": {"eval_loss": "nan"},
    }
    assert modernise(evaluation) == {
        "step": 4,
        "kind": "eval",
        "top1": 50.0,
        "loss": None,
        "graphs": 3,
        "graphs_eval": 1,
        "skipped_corrupt": 0,
        "nonfinite": {"loss": "nan"},
    }


def test_segments_of_an_old_attempt_and_a_new_one_are_one_history():
    evaluation = {"step": 4, "eval_top1": 50.0}
    history = replay([OLD, evaluation, {"rewind": 4}, {"step": 5, "kind": "train", "lr": 0.1}])
    assert history == [NEW, {"step": 5, "kind": "train", "lr": 0.1}]


def test_every_number_of_an_old_run_has_an_entry():
    lines = read_metrics(OLD_RUNS / "distilled")
    assert [line["kind"] for line in lines] == ["train"] * 4 + ["eval"]
    METRICS.require({name for line in lines for name in line if name not in HEAD})
    assert list(get_loss_terms(lines[0])) == ["task", "kd", "fitnet", "total"]
    assert list(get_learnt(lines[-1])) == ["top1", "top5", "loss", "ece", "examples"]
