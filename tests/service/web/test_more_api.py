"""Curves, comparisons, tables, trends: the library's results in their typed form."""

from __future__ import annotations

import csv
import io

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from service.jobs.files import ROOT
from service.sweeps.plan import keep_sweep, plan_trials, resolve_base
from service.sweeps.spec import SweepSpec
from service.web.app import create_app
from service.web.settings import ServiceSettings
from store.compare.report import choose_metrics, create_report
from store.query.selection import RunSelector
from tests.service.web.apps import make_app, make_client, make_store
from tests.support.stored_runs import make_config, make_lines, make_run


@pytest.fixture
def store(tmp_path):
    return make_store(tmp_path)


@pytest.fixture
def client(store):
    return make_client(make_app(store), "view")


def test_curves_are_reduced_to_the_points_of_a_chart(store, client):
    lines = make_lines(5000)
    lines[3000]["loss/total"] = 77.0
    make_run(store, "long", lines=lines, final={"eval_top1": 1.0})
    place = "/api/v1/runs/digits/long"
    assert "train.loss/total" in client.get(f"{place}/metrics").json()["keys"]
    query = {"metric": ["train.loss/total", "eval.top1"], "width": 100}
    curves = client.get(f"{place}/series", params=query).json()["curves"]
    assert [curve["metric"] for curve in curves] == query["metric"]
    assert len(curves[0]["steps"]) <= 200
    assert 77.0 in curves[0]["values"]
    query = {"metric": "train.lr", "start": 10, "end": 20}
    (curve,) = client.get(f"{place}/series", params=query).json()["curves"]
    assert curve["steps"] == list(range(9, 22))
    for bad, words in (
        ({"metric": "train.none"}, "none"),
        ({}, "metric"),
        ({"metric": "train.lr", "width": 5}, "width"),
        ({"metric": "train.lr", "start": 9, "end": 3}, "start"),
    ):
        answer = client.get(f"{place}/series", params=bad)
        assert answer.status_code == 422 and words in answer.json()["detail"]


def test_a_comparison_equals_the_librarys(store, client):
    for seed in range(6):
        config = make_config(**{"train.seed": seed, "optim.lr": 0.1})
        make_run(store, f"high{seed}", config=config, final={"eval_top1": 80.0 + seed})
    runs = {"run": ["base:name~seed", "high:name~high"]}
    found = client.get("/api/v1/compare", params=runs).json()
    app = make_app(store)
    selector = RunSelector(app.state.service.runs.get_index())
    sides = [selector.read_side(text) for text in runs["run"]]
    (wanted,) = create_report(sides, (), choose_metrics("", sides, "metrics")).metrics
    (rows,) = found["metrics"]
    assert [row["metric"] for row in rows] == [one.metric for one in wanted]
    top1 = next(row for row in rows if row["metric"] == "eval.top1")
    same = next(one for one in wanted if one.metric == "eval.top1")
    assert top1["delta"]["value"] == same.delta.value == pytest.approx(22.0)
    assert (top1["verdict"], top1["unit"]) == (same.verdict, same.entry.unit)
    assert [row["key"] for row in found["config"]] == ["optim.lr", "train.seed"]
    assert found["divergence"] is None


def test_the_first_difference_of_two_runs_is_found(store, client):
    lines = make_lines(4)
    lines[2]["loss/total"] += 1e-9
    make_run(store, "again", config=make_config(), lines=lines, final={"eval_top1": 60.0})
    runs = {"run": ["digits/seed0", "digits/again"]}
    found = client.get("/api/v1/compare", params=runs).json()["divergence"]["found"]
    assert (found["step"], found["metric"]) == (3, "loss/total")
    runs["run"][1] = "digits/seed0"
    assert client.get("/api/v1/compare", params=runs).json()["divergence"]["found"] is None


def test_gates_give_the_results_of_the_command_line(client):
    query = {"base": "digits/seed1", "new": "digits/seed0", "gate": "eval.top1:-:0.5:blocker"}
    found = client.get("/api/v1/gates", params=query).json()
    assert [one["outcome"] for one in found["findings"]] == ["fail"]
    assert (found["exit_code"], found["findings"][0]["worse"]) == (1, 1.0)
    query["gate"] = "eval.top1:-:2:blocker"
    assert client.get("/api/v1/gates", params=query).json()["exit_code"] == 0
    for gate in ("eval.top1", "eval.nothing:-:1:major", "eval.top1:-:x:major"):
        assert client.get("/api/v1/gates", params={**query, "gate": gate}).status_code == 422


@pytest.mark.parametrize(
    ("sides", "words"),
    [
        (["digits/seed0"], "run"),
        (["digits/seed0", "nothing"], "neither"),
        (["digits/seed0", "a:name=none"], "no run fits"),
        (["digits/seed0", "/etc/passwd"], "neither"),
        (["digits/seed0", "gs://b/x"], "neither"),
        (["digits/seed0", "a:name=("], "filter"),
    ],
)
def test_invalid_sides_are_refused(client, sides, words):
    answer = client.get("/api/v1/compare", params={"run": sides})
    assert answer.status_code == 422
    assert words in answer.json()["detail"]


def test_a_table_of_runs_holds_no_formulas(store, client):
    config = make_config()
    config["data"]["name"] = "=HYPERLINK(1)"
    make_run(store, "-dash", config=config, final={"eval_top1": -2.5}, git_commit="@x")
    answer = client.get("/api/v1/runs.csv", params={"show": "data.name,eval.top1"})
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    assert answer.headers["content-disposition"].startswith("attachment")
    head, *rows = csv.reader(io.StringIO(answer.text))
    row = dict(zip(head, next(row for row in rows if "dash" in row[0]), strict=True))
    assert row["data.name"] == "'=HYPERLINK(1)"
    assert row["eval.top1"] == "-2.5"
    assert len(rows) == 4


def test_a_sweep_returns_its_trials_and_tables(store, client):
    config = str(ROOT / "configs" / "smoke.yaml")
    spec = SweepSpec(name="lr", config=config, axes={"optim.lr": [0.1, 0.2]}, seeds=[0, 1])
    keep_sweep(str(store), spec, resolve_base(spec))
    first = plan_trials(spec)[0]
    make_run(store, first.run_id, experiment="smoke", final={"eval_top1": 70.0})
    assert client.get("/api/v1/sweeps").json() == {"sweeps": ["lr"]}
    found = client.get("/api/v1/sweeps/lr").json()
    assert [trial["state"] for trial in found["trials"]] == ["complete", *["missing"] * 3]
    assert found["trials"][0]["value"] == 70.0
    assert found["points"][0]["interval"]["mean"] == 70.0
    assert [row["trials"] for row in found["axes"]["optim.lr"]] == [2, 2]
    assert client.get("/api/v1/sweeps/none").status_code == 404
    (store / "sweeps" / "lr" / "sweep.json").write_text("{")
    assert client.get("/api/v1/sweeps/lr").status_code == 422


def test_a_store_without_reports_has_no_trends(client):
    assert client.get("/api/v1/trends").json() == {"trends": []}


class LostBucket(MemoryFileSystem):
    """A bucket whose client has lost the network."""

    protocol = "lost"

    def ls(self, path, detail=True, **kwargs):
        raise ConnectionError("Name or service not known")


def test_a_bucket_that_does_not_answer_is_one_line(monkeypatch):
    fsspec.register_implementation("lost", LostBucket, clobber=True)
    monkeypatch.setattr("utils.storage.retry._FIRST_WAIT_S", 0.0)
    app = create_app(ServiceSettings("lost://bucket/runs"))
    client = make_client(app, "view", raise_server_exceptions=False)
    answer = client.get("/api/v1/trends")
    assert answer.status_code == 503 and answer.json()["type"] == "storage.failed"
    line = "lost://bucket/runs/benchmarks: Name or service not known; check the bucket's name, "
    assert answer.json()["detail"].startswith(line)
    page = client.get("/trends", headers={"accept": "text/html"})
    assert page.status_code == 200 and "Name or service not known" in page.text
    assert app.state.service.runs.read_verdicts() == {}
