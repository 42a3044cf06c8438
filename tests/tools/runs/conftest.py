"""A store for the programs that query it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.stored_runs import make_config, make_run
from tools.runs.__main__ import main

Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """Four runs of two models, one of them still running."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, newest = tmp_path / "runs", ""
    for number, model in enumerate(("vit_tiny", "vit_tiny", "resnet")):
        config = make_config(**{"train.seed": number, "model.name": model})
        final = {"eval_top1": 60.0 + number, "eval_loss": 2.0 - number}
        run = make_run(folder, f"run{number}", config=config, final=final, newest_id=newest)
        newest = json.loads((run.path / "run.json").read_text())["id"]
    make_run(folder, "live", config=make_config(), newest_id=newest)
    return folder


@pytest.fixture
def ask(root, capsys) -> Ask:
    """Calls the program on the store; gives exit code, stdout and stderr."""

    def call(*flags: str, store: Path | str = root) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = main([*flags, "--store", str(store)])
        except SystemExit as error:
            code = error.code
        said = capsys.readouterr()
        return code, said.out, said.err

    return call
