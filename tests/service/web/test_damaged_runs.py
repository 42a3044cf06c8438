"""Runs with values of wrong type: the service's pages and its API respond all the same."""

from __future__ import annotations

import json

import pytest

from tests.service.web.apps import make_app, make_client
from tests.support.damaged_runs import choose, damage, list_places, make_whole

PLACES = (
    "/api/v1/runs/digits/{name}",
    "/api/v1/runs/digits/{name}/metrics",
    "/runs/digits/{name}",
    "/api/v1/runs/digits/{name}/series?metric=train.loss/total",
    "/api/v1/compare?run=digits/ok&run=digits/{name}",
    "/compare?run=digits/ok&run=digits/{name}",
)


@pytest.mark.filterwarnings("ignore")
def test_the_service_survives_damaged_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ok = make_whole(tmp_path / "runs")
    known = [
        (("attempts.jsonl", (0, "began")), '"x"'),
        (("run.json", (0, "id")), "7"),
        (("metrics.jsonl", (0, "loss/total")), '"x"'),
    ]
    pairs = [*known, *choose(list_places(ok), 9, seed=3)]
    names = [f"bad{number}" for number in range(len(pairs))]
    for name, pair in zip(names, pairs, strict=True):
        damage(ok, ok.parent / name, *pair)
    client = make_client(make_app(ok.parent.parent), raise_server_exceptions=False)
    found = {
        place.format(name=name): client.get(place.format(name=name)).status_code
        for name in ("ok", *names)
        for place in PLACES
    }
    assert {path: code for path, code in found.items() if code >= 500} == {}
    assert all(found[place.format(name="ok")] == 200 for place in PLACES), found
    answer = client.get("/api/v1/runs")
    assert "digits/ok" in {one["path"] for one in json.loads(answer.text)["runs"]}
    assert client.get("/").status_code < 400 and client.get("/runs").status_code < 500
