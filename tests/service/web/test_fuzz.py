"""Requests generated from the API's description: no 500 and no other form of response."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from service.checker import Verdict
from service.jobs.files import ROOT
from service.jobs.submission import Submission
from service.web.app import create_app
from service.web.settings import LOOPBACK, Limits, ServiceSettings
from store.record.artifacts import publish_artifacts
from tests.service.web.apps import make_store
from tests.support.stored_runs import make_run
from utils.config.keys import iterate_keys

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
    negative_data_rejection,
]
SEED = 17
# It never ends: tests/service/web/test_events.py
STREAMS = ("GET /api/v1/events",)
RUNS = (
    "digits/seed0",
    "digits/seed1",
    "digits/wild",
    "seed0,seed1",
    "a:name~seed",
    "b:tag",
    "",
    ",",
    "a:eval.top1>0",
    "a:(",
    "../x",
)
METRICS = ("train.loss/total", "eval.top1", "train.lr", "eval.loss", "train.none", ".", "")


@pytest.fixture
def app(tmp_path, monkeypatch):
    store = make_store(tmp_path)
    nan, inf = float("nan"), float("inf")
    lines = [
        {
            "step": 1,
            "kind": "train",
            "attempt": 1,
            "loss/total": None,
            "lr": 1e308,
            "nonfinite": {"loss/total": "inf"},
        },
        {"step": 2, "kind": "train", "attempt": 1, "loss/total": None, "lr": -1e308},
        {"step": 2, "kind": "eval", "attempt": 1, "top1": 1e308, "loss": None},
    ]
    make_run(store, "wild", lines=lines, final={"eval_top1": nan, "eval_loss": inf, "x": -inf})
    publish_artifacts(store / "digits" / "seed1")
    (store / "digits" / "damaged").mkdir()
    (store / "digits" / "damaged" / "run.json").write_text("{")
    app = create_app(
        ServiceSettings(
            str(store), hosts=(*LOOPBACK, "testserver"), limits=Limits(changes_per_minute=1_000_000)
        )
    )
    service = app.state.service
    verdict = Verdict("0" * 12, "smoke/x", (), "")
    monkeypatch.setattr(service.checker, "check", lambda *_: verdict)
    service.queue.submit(
        Submission(config=str(ROOT / "configs/smoke.yaml"), overrides={"run.run_id": "first"}), "me"
    )
    return app


def find_known(app) -> dict[str, tuple[object, ...]]:
    """Map names of parameters to existing values, so that not every request is refused."""
    service = app.state.service
    (job,) = service.queue.list()
    detail = service.runs.open_run("digits", "seed1").artifacts
    from service.web.artifacts import create_artifact_id

    return {
        "experiment": ("digits",),
        "name": ("seed0", "seed1", "wild", "damaged", "killed"),
        "job_id": (job.id,),
        "artifact_id": tuple(create_artifact_id(a["path"]) for a in detail),
        "run": ([one, other] for one in RUNS for other in RUNS),
        "base": RUNS,
        "new": RUNS,
        "metric": tuple([one] for one in METRICS),
        "metrics": METRICS,
        "sort": ("eval.top1", "path", "data.name", "started", "tag"),
        "show": ("eval.top1,train.seed", "tag,path", "model.args.heads"),
        "filter": ("eval.top1>0", "not tag", "name~seed or status=complete", "x=nan", "started>1"),
        "gate": (["eval.top1:-:1:major"], ["eval.top1@p95:3:-:minor?"], ["eval.loss:1:1:blocker"]),
        "state": ("queued", "queued,running"),
        "tail_bytes": (1, 100),
    }


@st.composite
def draw_body(draw) -> dict[str, object]:
    """A submission of known keys with values of all kinds."""
    scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
    values = st.recursive(
        scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=4
    )
    keys = st.sampled_from([*iterate_keys(), "model.args.depth", "distill.teachers"])
    return {
        "config": draw(st.sampled_from(["configs/smoke.yaml", "configs/digits_student.yaml"])),
        "overrides": draw(st.dictionaries(keys, values, max_size=3)),
        "dry_run": draw(st.booleans()),
    }


@pytest.mark.parametrize(
    "count", [pytest.param(20_000, marks=pytest.mark.slow), 500], ids=["all", "some"]
)
def test_generated_requests_get_responses_that_match_openapi(app, count):
    token = app.state.service.tokens.add("fuzz", "admin")
    headers = {"Authorization": f"Bearer {token}"}
    schema = schemathesis.openapi.from_asgi("/api/v1/openapi.json", app, headers=headers)
    operations = [found.ok() for found in schema.get_all_operations()]
    operations = [one for one in operations if one.label not in STREAMS]
    assert len(operations) >= 21
    known = {name: list(values) for name, values in find_known(app).items()}
    asked: Counter[int] = Counter()
    for operation in operations:
        fuzz(operation, headers, known, -(-count // len(operations)), asked)
    assert asked.total() >= count
    # Each kind of answer was among them: not everything was refused.
    assert {200, 404, 422} <= asked.keys()
    assert asked[200] > asked.total() / 10
    assert (Path(app.state.service.store) / "digits").is_dir()


def fuzz(operation, headers, known, count: int, asked: Counter[int]) -> None:
    """Call one operation so many times, half of them with known values."""

    @seed(SEED)
    @settings(max_examples=count, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
    @given(case=operation.as_strategy(), data=st.data())
    def ask(case, data) -> None:
        is_known = data.draw(st.booleans())
        if is_known:
            fill(case, known, data)
        answer = case.call(headers=headers)
        asked[answer.status_code] += 1
        # What was filled in is no longer what the generator calls wrong.
        checks = [one for one in CHECKS if not (is_known and one is negative_data_rejection)]
        case.validate_response(answer, checks=checks)

    ask()


def fill(case, known, data) -> None:
    """Put known values into a case."""
    for part in (case.path_parameters, case.query):
        if not isinstance(part, dict):
            continue
        for name in part:
            if name in known:
                part[name] = data.draw(st.sampled_from(known[name]))
    if case.operation.label.endswith("/submit"):
        case.body, case.media_type = data.draw(draw_body()), "application/json"
