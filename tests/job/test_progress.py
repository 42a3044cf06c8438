"""Progress lines of a run."""

from __future__ import annotations

import logging

from job.recording import Progress

LINE = {
    "loss/task": 2.0,
    "loss/kd": 0.5,
    "loss/kd_2": 0.25,
    "loss/total": 1.5,
    "grad_norm": 3.0,
    "lr": 1e-3,
    "epoch": 0.5,
    "points_per_s": 40.0,
}


def test_a_log_line_of_a_distillation_run_shows_its_terms(caplog):
    caplog.set_level(logging.INFO)
    progress = Progress(0, 10, enabled=True)
    progress.show(4, LINE)
    text = "total 1.5, task 2, kd 0.5, kd_2 0.25, lr 0.001, grad_norm 3, points_per_s 40"
    assert caplog.messages == [f"step 4/10: {text}"]


def test_other_ranks_are_silent(caplog):
    caplog.set_level(logging.INFO)
    Progress(0, 10, enabled=False).show(4, LINE)
    assert caplog.messages == []
