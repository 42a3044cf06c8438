"""The lines that a person sees of a run."""

from __future__ import annotations

import logging

from utils.progress import Progress

LINE = {"task": 2.0, "kd": 0.5, "kd_2": 0.25, "total": 1.5, "grad_norm": 3.0, "lr": 1e-3, "step": 4}


def test_a_log_line_of_a_distillation_run_shows_its_terms(caplog):
    caplog.set_level(logging.INFO)
    progress = Progress(0, 10, enabled=True, terms=("kd", "kd_2"))
    progress.show(4, LINE)
    text = "step 4/10: total 1.5, task 2, kd 0.5, kd_2 0.25, lr 0.001, grad_norm 3"
    assert caplog.messages == [text]


def test_other_ranks_and_unknown_numbers_are_silent(caplog):
    caplog.set_level(logging.INFO)
    Progress(0, 10, enabled=False, terms=("kd",)).show(4, LINE)
    assert caplog.messages == []
    Progress(0, 10, enabled=True).show(4, LINE)
    assert "kd" not in caplog.text
