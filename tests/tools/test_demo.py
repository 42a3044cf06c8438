"""The demo's end: the gain by distillation, as `runs compare` shows it."""

from __future__ import annotations

import pytest

from tests.support.stored_runs import make_config, make_run
from tools import demo


@pytest.mark.parametrize(("seeds", "words"), [(6, "better"), (1, "n too small to tell")])
def test_the_demo_ends_with_distilled_versus_alone(tmp_path, capsys, monkeypatch, seeds, words):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = tmp_path / "runs"
    gains = {"alone": 0.0, "distilled": 2.0, "other": 9.0}
    for role, gain in gains.items():
        for seed in range(seeds):
            top1 = 90 + gain + 0.1 * seed * gain
            final = {"test_top1": top1, "eval_top1": 88.0, "eval_loss": 0.4}
            config = make_config(**{"train.seed": seed})
            make_run(store, f"{role}-seed{seed}", experiment="demo", config=config, final=final)
    numbers = [str(seed) for seed in range(seeds)]
    options = demo.main.parse(["--output-dir", str(store), "--seeds", *numbers])
    assert demo.compare(options) == 0
    said = capsys.readouterr().out
    line = next(line for line in said.splitlines() if line.startswith("test.top1"))
    assert words in line and ("92.5" in line or seeds == 1)
    assert f"distilled  {seeds} x" in said and "other" not in said
    assert "data:image/png" in (store / "demo.html").read_text()
