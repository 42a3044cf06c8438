"""How often a run is evaluated, in epochs or in steps."""

from __future__ import annotations

import main
from store.record.history import read_metrics
from tests.support.tiny_parts import create_argv


def list_evaluated(folder) -> list[int]:
    return [line["step"] for line in read_metrics(folder) if line["kind"] == "eval"]


def test_step_based_evaluation_overrides_epochs_and_continues_on_resume(tmp_path, capsys):
    """Of 6 steps an epoch; another distance is no other run."""
    flags = ("--train.eval_every_epochs=0.5", "--train.eval_every_steps=4", "--run.run_id=a")
    folder = tmp_path / "tiny" / "a"
    assert main.main(create_argv(tmp_path, *flags, "--train.steps=10")) == 0
    assert list_evaluated(folder) == [4, 8, 10]
    more = (*flags[:1], "--train.eval_every_steps=5", "--train.steps=15", "--resume=auto")
    assert main.main(create_argv(tmp_path, *more)) == 0
    assert list_evaluated(folder) == [4, 8, 10, 15]
    patience = ("--train.early_stop_patience=3", "--train.eval_every_steps=4", "--train.steps=12")
    capsys.readouterr()
    assert main.main(create_argv(tmp_path, *patience, "--check")) == 2
    assert "must be less than the run's 3 evaluations" in capsys.readouterr().err
