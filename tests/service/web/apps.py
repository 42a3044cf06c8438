"""A service over a small store, and clients with a role."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.testclient import TestClient

from service.web.app import create_app
from service.web.settings import Limits, ServiceSettings
from tests.support.stored_runs import make_config, make_lines, make_run

ORIGIN = "http://127.0.0.1:8080"


def make_store(root: Path) -> Path:
    """Three runs: two that are complete and one that was killed."""
    store = root / "runs"
    for seed in (0, 1):
        make_run(
            store,
            f"seed{seed}",
            config=make_config(**{"train.seed": seed}),
            final={"eval_top1": 60.0 + seed, "parameters": 10},
        )
    make_run(store, "killed")
    return store


def make_mixed_store(root: Path) -> Path:
    """Runs of several tasks, and one that has not been evaluated yet."""
    store = root / "runs"
    numbers = {
        "images": {"top1": 50.0, "loss": 1.5},
        "text": {"loss": 1.5, "perplexity": 4.5},
        "rows": {"mse": 3100.0, "mae": 40.0, "r2": 0.4},
        "features": {"distil_loss": 0.25},
        "probed": {"distil_loss": 0.25, "digits/knn": 40.0},
    }
    tasks = {"images": "classify", "text": "language", "rows": "regress"}
    for name, told in numbers.items():
        config = make_config(**{"train.task": tasks.get(name, "distil")})
        config["distill"] = {"score": "digits/knn" if name == "probed" else ""}
        line = {"step": 4, "kind": "eval", "attempt": 1, **told}
        final = {f"eval_{key}": value for key, value in told.items()}
        make_run(store, name, config=config, lines=[*make_lines(4)[:-1], line], final=final)
    make_run(store, "live", lines=make_lines(4)[:-1])
    return store


def make_app(store: Path, **limits: float) -> FastAPI:
    """Its service; the limits are those of `Limits`."""
    return create_app(ServiceSettings(str(store), limits=Limits(**limits)))


def make_client(app: FastAPI, role: str = "admin", **options: object) -> TestClient:
    """A program with a token of that role; empty: without any."""
    headers = {}
    if role:
        headers = {"authorization": f"Bearer {app.state.service.tokens.add(role, role)}"}
    return TestClient(app, base_url=ORIGIN, headers=headers, follow_redirects=False, **options)
