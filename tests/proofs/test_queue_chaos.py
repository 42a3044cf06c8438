"""The proof of the queue under kills, with fewer kills."""

from __future__ import annotations

import json

import pytest

from proofs import queue_chaos


@pytest.mark.slow
def test_no_kill_of_a_dispatcher_loses_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert queue_chaos.main(["jobs", "--jobs", "2", "--kills", "5"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["complete"] == 2 and found["attempts"] == 2


@pytest.mark.slow
def test_a_harassed_sweep_ends_with_the_same_weights(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", "--trials", "3", "--kills", "4", "--trial-kills", "3"]
    assert queue_chaos.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["equal_weights"] and found["runs_with_weights"] == 3
    assert found["attempts"] > 3
