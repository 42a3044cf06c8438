"""The one metric by which a run of any task is ranked."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from store.index.database import RunIndex
from store.query.listing import order_runs
from store.record.catalogue import Score, get_sign, select_score
from tasks import TASKS
from tasks.classify.counting import ECE_BINS
from tasks.classify.multilabel import ScoreTable
from tests.service.web.apps import make_mixed_store
from tests.support.stored_runs import make_run

# What `summarise` of each task reads, of one example each.
SUMS = {
    "classify": torch.tensor([1.0, 1.0, 0.7, 2.0, *[0.0] * (3 * ECE_BINS)]),
    # Two classes of one example: loss, examples, three counts a class, scores, classes and a 1.
    "multilabel": torch.tensor([0.7, 1.0, 1, 0, 0, 1, 0, 0, 0.3, -0.2, 1, 0, 1]),
    "distil": torch.tensor([2.0, 3.0]),
    "language": torch.tensor([1.5, 0.5, 4.0, 1.0]),
    "regress": torch.tensor([2.0, 3.0, 1.0, 0.5, 2.0]),
}
PARTS = SimpleNamespace(
    _table=ScoreTable(1, 2), losses=SimpleNamespace(terms=()), names=("y",), _spread=(2.0,)
)


@pytest.mark.parametrize("name", sorted(SUMS))
def test_a_stored_runs_score_is_its_tasks_metric(name):
    assert set(SUMS) == set(TASKS)
    evaluation = TASKS.get(name).summarise(PARTS, SUMS[name])
    score = select_score({f"eval.{key}": value for key, value in evaluation.metrics.items()})
    assert get_sign(score.name) * score.value == evaluation.score


def test_a_probe_that_the_configuration_names_is_the_score():
    values = {"eval.distil_loss": 0.5, "eval.digits/knn": 40.0, "train.loss/total": 1.0}
    assert select_score(values, "digits/knn") == Score("eval.digits/knn", 40.0)
    assert select_score(values, "other/knn") == Score("eval.distil_loss", 0.5)
    assert select_score({"train.loss/total": 1.0, "test.top1": 3.0}) is None


def test_an_external_task_is_scored_by_its_first_metric_with_a_direction():
    assert select_score({"eval.examples": 9.0, "eval.ece": 0.1, "eval.top5": 70.0}) == (
        Score("eval.top5", 70.0)
    )


def test_the_index_filters_and_sorts_by_scores(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = make_mixed_store(tmp_path)
    make_run(store, "better", final={"eval_top1": 90.0})
    make_run(store, "broken", final={"eval_top1": math.nan})
    index = RunIndex(str(store))
    index.refresh()
    names = index.read_column("name")
    order = [names[run] for run in order_runs(index, index.read_order(), "score.value")]
    assert order.index("better") < order.index("images") < order.index("broken")
    assert order[-1] == "live"
    found = index.select("score.name=eval.top1 and score.value>60")
    assert [names[run] for run in found] == ["better"]
