"""Submitting, watching and stopping over the API: the checks of main.py, the queue's own files."""

from __future__ import annotations

import json

import pytest

from service.checker import Verdict
from service.jobs.files import append_event
from tests.service.web.apps import make_app, make_client, make_store

CONFIG = "configs/smoke.yaml"


@pytest.fixture
def app(tmp_path):
    return make_app(make_store(tmp_path), changes_per_minute=1000)


@pytest.fixture
def checked(app, monkeypatch):
    """Replace the checks; return the list of submissions that they got."""
    asked = []

    def check(submission, store):
        asked.append(submission)
        run = f"smoke/{submission.overrides['run.run_id']}"
        return Verdict("0" * 12, run, ("device: cpu",), "")

    monkeypatch.setattr(app.state.service.checker, "check", check)
    return asked


def test_a_dry_run_describes_the_job_and_queues_nothing(app, checked):
    client = make_client(app, "submit")
    body = {"config": CONFIG, "overrides": {"train.steps": 2}, "dry_run": True}
    answer = client.post("/api/v1/submit", json=body).json()
    assert answer["job"] is None and answer["lines"] == ["device: cpu"]
    assert client.get("/api/v1/jobs").json()["matched"] == 0
    assert checked[0].overrides["train.steps"] == 2


def test_a_submission_is_queued_under_its_checked_name(app, checked):
    client = make_client(app, "submit")
    body = {"config": CONFIG, "overrides_yaml": "train: {steps: 2}\noptim.lr: 0.01"}
    answer = client.post("/api/v1/submit", json=body)
    assert answer.status_code == 200, answer.text
    job = answer.json()["job"]
    assert job["state"] == "queued" and job["who"] == "submit"
    assert job["run"] == answer.json()["run"]
    assert checked[0].overrides["optim.lr"] == 0.01
    assert client.get(f"/api/v1/jobs/{job['id']}").json() == job
    assert client.get("/api/v1/jobs?state=queued").json()["jobs"] == [job]
    assert client.get("/api/v1/jobs?state=running").json()["matched"] == 0
    refused = client.get("/api/v1/jobs?state=running,bogus")
    assert refused.status_code == 422 and "('bogus') is unknown" in refused.json()["detail"]
    lines = app.state.service.audit.read(10)
    assert {"action": "submit", "who": "submit", "job": job["id"]}.items() <= lines[1].items()
    # The same run again is the same job.
    body["overrides"] = {"run.run_id": job["run"].rpartition("/")[2]}
    assert client.post("/api/v1/submit", json=body).status_code == 409


REFUSED = [
    ({"config": "/etc/passwd"}, "no file of configs/"),
    ({"config": CONFIG, "overrides": {"optim.learning": 1}}, "optim.learning"),
    ({"config": CONFIG, "overrides": {"optim.lr": "much"}}, "optim.lr"),
    ({"config": CONFIG, "overrides": {"optim.lr": -1}}, "optim.lr"),
    ({"config": CONFIG, "overrides": {"data.root": "/etc"}}, "data.root"),
    ({"config": CONFIG, "overrides": {"run.output_dir": "/tmp"}}, "run.output_dir"),
    ({"config": CONFIG, "overrides": {"run.run_id": "../x"}}, "run.run_id"),
    ({"config": CONFIG, "overrides": {"run.experiment": "jobs"}}, "run.experiment"),
    ({"config": CONFIG, "overrides": {"model.args.checkpoint_path": "x"}}, "checkpoint_path"),
    ({"config": CONFIG, "overrides": {"lr": 1}}, "lr"),
    ({"config": CONFIG, "overrides_yaml": "a: &x 1"}, "anchor"),
    ({"config": CONFIG, "slots": 0}, "slots"),
    ({"config": CONFIG, "extra": 1}, "extra"),
    ({}, "config"),
    ([], "body"),
    ({"config": CONFIG, "overrides": {"\ud800.a": 1}}, "unicode"),
    ({"config": "\ud800"}, "config"),
    ({"config": CONFIG, "overrides_yaml": "\ud800"}, "unicode"),
    ({"config": CONFIG, "overrides": {"run.resume": "/x"}}, "run.resume"),
    ({"config": CONFIG, "overrides": {"": 1}}, "key"),
    ({"config": CONFIG, "overrides": {"optim.args" + ".a" * 5000: 1}}, "at most 256 letters"),
    ({"config": CONFIG, "overrides": {"optim.args" + ".a" * 120: "/etc"}}, "optim.args"),
    ({"config": CONFIG, "overrides_yaml": "a." * 9000 + "b: 1"}, "a."),
    ({"config": CONFIG, "overrides": {"data.name": "\ud800"}}, "data.name"),
]


@pytest.mark.parametrize(("body", "words"), REFUSED)
def test_an_invalid_submission_is_refused_in_one_sentence(app, checked, body, words):
    # Half of a pair is a text of JSON that no encoding can hold.
    client, headers = make_client(app, "submit"), {"content-type": "application/json"}
    answer = client.post("/api/v1/submit", content=json.dumps(body), headers=headers)
    assert answer.status_code == 422
    assert words in answer.json()["detail"] and "\n" not in answer.json()["detail"]
    assert app.state.service.queue.list() == []
    assert checked == []


def test_the_type_of_a_refusal_is_the_code_that_main_prints(app, capsys):
    for key, value, code in (
        ("optim.lrr", 1, "config.unknown_key"),
        ("optim.lr", -1, "config.invalid_value"),
        ("train.early_stop_min_delta", 1, "config.conflict"),
    ):
        body = {"config": CONFIG, "overrides": {key: value}}
        answer = make_client(app, "submit").post("/api/v1/submit", json=body)
        assert (answer.status_code, answer.json()["type"]) == (422, code)
    assert app.state.service.queue.list() == []


def test_submissions_that_main_refuses_are_refused_with_its_message(app, monkeypatch):
    verdict = Verdict("0" * 12, "smoke/x", (), "data.name: no such data", "data.refused")
    monkeypatch.setattr(app.state.service.checker, "check", lambda *_: verdict)
    answer = make_client(app, "submit").post("/api/v1/submit", json={"config": CONFIG})
    assert (answer.status_code, answer.json()["detail"]) == (422, "data.name: no such data")
    assert answer.json()["type"] == "data.refused"
    assert app.state.service.queue.list() == []


def test_jobs_are_stopped_only_by_their_owner(app, checked):
    client, admin = make_client(app, "submit"), make_client(app, "admin")
    other = make_client(app, "")
    other.headers["authorization"] = f"Bearer {app.state.service.tokens.add('other', 'submit')}"
    job = client.post("/api/v1/submit", json={"config": CONFIG}).json()["job"]["id"]
    assert other.post(f"/api/v1/jobs/{job}/stop").status_code == 403
    assert client.post(f"/api/v1/jobs/{job}/stop").status_code == 200
    assert admin.post(f"/api/v1/jobs/{job}/stop").status_code == 200
    assert client.post("/api/v1/jobs/nothing/stop").status_code == 404
    assert client.post(f"/api/v1/jobs/{job}/reopen").status_code == 409
    append_event(app.state.service.queue.find(job), "finished", state="stopped", reason="")
    assert client.post(f"/api/v1/jobs/{job}/stop").status_code == 409
    assert client.post(f"/api/v1/jobs/{job}/reopen").json()["state"] == "queued"


def test_the_end_of_a_log_comes_without_terminal_controls(app, checked):
    client = make_client(app, "submit")
    job = client.post("/api/v1/submit", json={"config": CONFIG}).json()["job"]["id"]
    folder = app.state.service.queue.find(job)
    (folder / "log.txt").write_bytes(b"start\n\x1b[31m10%\r20%\x1b[0m\n\xff end\n")
    assert client.get(f"/api/v1/jobs/{job}/log").json()["text"] == "start\n20%\n\ufffd end\n"
    text = client.get(f"/api/v1/jobs/{job}/log", params={"tail_bytes": 5}).json()["text"]
    assert text == " end\n"


def test_configurations_that_may_be_submitted_are_listed(app):
    found = make_client(app, "view").get("/api/v1/configs").json()["configs"]
    assert CONFIG in found
    assert not any("presets" in name for name in found)


@pytest.mark.parametrize("path", ["runs", "runs.csv", "jobs"])
def test_an_unknown_query_parameter_of_a_list_is_refused(app, path):
    answer = make_client(app, "view").get(f"/api/v1/{path}?bogus=1")
    assert answer.status_code == 422 and "bogus" in answer.json()["detail"]
