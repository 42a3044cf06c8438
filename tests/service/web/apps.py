"""A service over a small store, and somebody who may ask it."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.testclient import TestClient

from service.web.app import create_app
from service.web.settings import Limits, ServiceSettings
from tests.support.stored_runs import make_config, make_run

ORIGIN = "http://127.0.0.1:8080"


def make_store(root: Path) -> Path:
    """Three runs: two that are complete and one that was killed."""
    store = root / "runs"
    for seed in (0, 1):
        make_run(
            store, f"seed{seed}", config=make_config(**{"train.seed": seed}),
            final={"eval_top1": 60.0 + seed, "parameters": 10},
        )  # fmt: skip
    make_run(store, "killed")
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
