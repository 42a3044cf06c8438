"""`/api/v1/runs`: the index's content in the requested order."""

from __future__ import annotations

import json

import pytest

from store.lineage.ancestors import BAD, Ancestor, note_run, view_lineage
from store.query.tags import change_tags
from store.record.runs import Run
from tests.service.web.apps import make_app, make_client, make_store
from tests.support.stored_runs import make_run
from utils.error_codes import ERROR_CODES
from utils.storage.places import open_folder


@pytest.fixture
def client(tmp_path):
    return make_client(make_app(make_store(tmp_path)), "view")


def test_runs_come_newest_first_filtered_sorted_and_with_chosen_columns(client):
    found = client.get("/api/v1/runs").json()
    assert found["matched"] == 3
    assert [run["name"] for run in found["runs"]] == ["killed", "seed1", "seed0"]
    assert found["runs"][0]["shown_status"] == "killed"
    query = {"filter": "eval.top1>0", "sort": "eval.top1", "show": "train.seed,eval.top1"}
    found = client.get("/api/v1/runs", params=query).json()
    assert [run["values"] for run in found["runs"]][:2] == [
        {"train.seed": 1, "eval.top1": 61.0},
        {"train.seed": 0, "eval.top1": 60.0},
    ]
    page = client.get("/api/v1/runs", params={"offset": 1, "limit": 1}).json()
    assert [run["name"] for run in page["runs"]] == ["seed1"]


def test_a_run_returns_everything_but_its_history(client):
    found = client.get("/api/v1/runs/digits/seed1").json()
    assert found["config"]["train.seed"] == 1
    assert found["values"]["eval.top1"] == 61.0
    assert found["shown_status"] == "complete"


def test_a_run_returns_its_teachers_with_their_metrics_and_its_students(tmp_path):
    store = make_store(tmp_path)
    known = note_run(Ancestor(1, place="seed0"), open_folder(store / "digits" / "seed0"))
    Run(store / "digits" / "killed").update(lineage=view_lineage(known))
    change_tags(open_folder(store / "digits" / "seed0"), [BAD], [])
    client = make_client(make_app(store), "view")
    (teacher,) = client.get("/api/v1/runs/digits/killed").json()["lineage"]["teachers"]
    assert (teacher["now"], teacher["scores"]["eval.top1"]) == ("digits/seed0", 60.0)
    assert teacher["tags"] == [BAD]
    lineage = client.get("/api/v1/runs/digits/seed0").json()["lineage"]
    student = {"path": "digits/killed", "generation": 1, "via": "teacher"}
    assert lineage == {"teachers": [], "students": [student]}


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/api/v1/runs/digits/none", 404, "contains no run.json"),
        ("/api/v1/runs/digits/.hidden", 422, "name"),
        ("/api/v1/runs?filter=a%3D", 422, "filter"),
        ("/api/v1/runs?sort=nothing", 422, "nothing"),
        ("/api/v1/runs?limit=0", 422, "limit"),
        ("/api/v1/nothing", 404, "Not Found"),
    ],
)
def test_an_invalid_query_is_a_typed_problem_in_one_sentence(client, path, status, words):
    answer = client.get(path)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["status"] == status and problem["type"] in ERROR_CODES
    assert status != 404 or problem["type"] == "service.not_found"
    assert words in problem["detail"] and "\n" not in problem["detail"]


def test_a_number_that_is_not_finite_is_text(tmp_path):
    store = make_store(tmp_path)
    make_run(store, "wild", final={"eval_top1": float("nan"), "eval_loss": float("inf")})
    client = make_client(make_app(store), "view")
    values = client.get("/api/v1/runs/digits/wild").json()["values"]
    assert (values["eval.top1"], values["eval.loss"]) == ("nan", "inf")


WRONG = {
    "id": 5,
    "status": ["x"],
    "started": "now",
    "ended": True,
    "attempts": "many",
    "final": [1],
    "final_up_to_step": 1e300,
    "environment": 7,
    "experiment": {},
    "name": None,
    "nonfinite": 3,
}


@pytest.mark.parametrize("key", WRONG)
def test_fields_of_wrong_type_are_left_out(tmp_path, key):
    """A program that can write to a run's directory may have written anything."""
    store = make_store(tmp_path)
    run = store / "digits" / "seed0"
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**facts, key: WRONG[key]}))
    (run / "config_resolved.yaml").write_text("a: {b: 2026-01-01, 3: !!binary aGk=, c: .nan}\n")
    (run / "attempts.jsonl").write_text('{"attempt": 1, "began": "x", "ended": NaN}\n[1]\n')
    (run / "artifacts.json").write_text('{"artifacts": [1, {"path": 2}, null]}')
    (run / "tags.json").write_text('{"tags": 3}')
    client = make_client(make_app(store), "view")
    found = client.get("/api/v1/runs/digits/seed0")
    if found.status_code == 200:
        assert found.json()["config"]["a.c"] == "nan"
    else:
        assert found.status_code == 404 and "run.json is damaged" in found.json()["detail"]
    assert client.get("/runs/digits/seed0").status_code == found.status_code
    for path in ("/api/v1/runs", "/api/v1/runs.csv", "/"):
        assert client.get(path).status_code == 200, path
    sides = {"run": ["digits/seed0", "digits/seed1"]}
    assert client.get("/api/v1/compare", params=sides).status_code in (200, 422)


def test_a_link_out_of_the_store_is_not_a_run(tmp_path):
    store = make_store(tmp_path)
    make_run(tmp_path / "elsewhere", "secret", final={"eval_top1": 1.0})
    (store / "digits" / "linked").symlink_to(tmp_path / "elsewhere" / "digits" / "secret")
    client = make_client(make_app(store), "view")
    assert client.get("/api/v1/runs/digits/linked").status_code == 404
