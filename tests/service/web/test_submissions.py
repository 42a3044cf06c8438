"""Generated submissions: each is queued with the hash that `main.py` computes, or refused."""

from __future__ import annotations

import json
import random
import subprocess
from typing import get_args

import pytest

from service.checker import Checker
from service.jobs.files import CONFIG_FILE
from store.query.changes import hash_config
from tests.service.web.apps import make_app, make_client
from utils.config.command_line import get_kinds
from utils.config.keys import get_resume_rules, iterate_keys
from utils.config.load import RunConfig, load_config

SEED = 20261122
CONFIGS = (
    "configs/smoke.yaml",
    "configs/digits_student.yaml",
    "configs/transformer_text.yaml",
    "configs/regression/diabetes_linear.yaml",
)
WORDS = (
    "",
    "digits",
    "none",
    "auto",
    "vit_tiny",
    "a b",
    "naïve",
    "0",
    "true",
    "/etc/passwd",
    "../x",
    "gs://bucket/x",
    "\ud800",
    "x" * 300,
    "a\nb",
)
KEYS = [*iterate_keys(), "model.args.depth", "optim.args.eps", "optim.lrr", "nothing.x", "lr", ""]


def draw_value(key: str, draw: random.Random) -> object:
    """A value that mostly fits the key's type, and sometimes none of its kind."""
    kinds = get_kinds(key) if draw.random() < 0.8 else {draw.choice((int, str, list, dict, bool))}
    choices = get_choices(key)
    if choices and draw.random() < 0.8:
        return draw.choice(choices)
    makers = {
        int: lambda: draw.choice((0, 1, 2, 7, 50, -1, 1 << 40)),
        float: lambda: draw.choice((0.0, 0.1, 0.5, 1.0, 2.5, -1.0, 1e-9, 3)),
        bool: lambda: draw.random() < 0.5,
        str: lambda: draw.choice(WORDS),
        list: lambda: [draw.choice((1, "a", 0.5)) for _ in range(draw.randrange(3))],
        tuple: lambda: [draw.choice((1, "a", 0.5)) for _ in range(draw.randrange(3))],
        dict: lambda: {draw.choice(("depth", "eps", "checkpoint_path")): draw.choice((1, "x"))},
        type(None): lambda: None,
    }
    known = [makers[kind] for kind in makers if kind in kinds]
    return draw.choice(known)() if known else draw.choice(WORDS)


def get_choices(key: str) -> tuple[object, ...]:
    """The words of a key that takes one of a few."""
    section, _, name = key.partition(".")
    owner = RunConfig.model_fields.get(section)
    field = owner.annotation.model_fields.get(name) if owner else None
    found = get_args(field.annotation) if field else ()
    return found if found and all(isinstance(one, str) for one in found) else ()


def draw_submission(draw: random.Random) -> dict[str, object]:
    keys = draw.choices(KEYS, k=draw.choice((0, 1, 1, 2, 3)))
    overrides = {key: draw_value(key, draw) for key in keys}
    body: dict[str, object] = {"config": draw.choice(CONFIGS), "overrides": overrides}
    if draw.random() < 0.1:
        body["overrides_yaml"] = draw.choice(("optim.lr: 0.5", "optim: {lr: 1e-4}", "a: &a 1"))
    return body


@pytest.mark.parametrize(
    "count", [pytest.param(5000, marks=pytest.mark.slow), 60], ids=["all", "some"]
)
def test_a_submission_is_queued_with_mains_hash_or_refused(tmp_path, monkeypatch, count):
    (tmp_path / "runs").mkdir()
    app = make_app(tmp_path / "runs", changes_per_minute=1_000_000)
    if count < 5000:  # the checks in their own program are the long proof's
        monkeypatch.setattr(Checker, "_ask", lambda *_: {"lines": []})
    started: list[object] = []
    real = subprocess.Popen
    monkeypatch.setattr(
        "subprocess.Popen", lambda *args, **more: started.append(args) or real(*args, **more)
    )
    draw, queue, rules = random.Random(SEED), app.state.service.queue, get_resume_rules()
    queued: set[str] = set()
    with make_client(app, "submit") as client:
        for _ in range(count):
            body = draw_submission(draw)
            answer = post(client, body)
            if answer.status_code != 200:
                detail = answer.json()["detail"]
                assert answer.status_code in (409, 422), (body, answer.text)
                assert detail and "\n" not in detail and "Traceback" not in detail, body
                continue
            job = answer.json()["job"]
            queued.add(job["id"])
            config = load_config(["--config", str(queue.folder / job["id"] / CONFIG_FILE)])
            wanted = hash_config(config.model_dump(mode="json"), rules)
            assert job["config_hash"] == answer.json()["config_hash"] == wanted, body
            assert config.run.run_id == job["run"].rpartition("/")[2]
    app.state.service.checker.close()
    assert {folder.name for folder in queue.list_folders()} == queued
    assert count / 10 < len(queued) < count * 0.9
    # The checks' own program apart, nothing was started: not by those refused, not by the others.
    assert all("checker_child" in str(args) for args in started)


def post(client, body: dict[str, object]):
    """As a program may send it: halves of pairs, too."""
    headers = {"content-type": "application/json"}
    return client.post("/api/v1/submit", content=json.dumps(body), headers=headers)
