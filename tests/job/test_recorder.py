"""What runs by main.py tell of their time."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest

import main
from store.models import SpanLine
from store.spans import SPANS_FILE, Span, parse_spans
from store.validation import check_run
from tests.support.tiny_parts import create_argv
from utils.storage import open_folder

FLAGS = ("--run.run_id=a", "--train.log_every_steps=4", "--train.checkpoint_every_steps=5",
         "--train.eval_every_epochs=1", "--runtime.num_threads=1")  # fmt: skip


@pytest.fixture(scope="module")
def stopped_and_done(tmp_path_factory) -> Path:
    """A run of 8 steps that was given 14 afterwards."""
    output = tmp_path_factory.mktemp("runs")
    assert main.main(create_argv(output, *FLAGS, "--train.steps=8")) == 0
    assert main.main(create_argv(output, *FLAGS, "--train.steps=14", "--resume=auto")) == 0
    return output / "tiny" / "a"


def read(folder: Path) -> list[Span]:
    return parse_spans((folder / SPANS_FILE).read_text())


def test_every_step_is_in_one_window_and_has_its_line(stopped_and_done):
    spans = read(stopped_and_done)
    for attempt, steps in ((1, range(1, 9)), (2, range(9, 15))):
        mine = [span for span in spans if span.attempt == attempt]
        assert [span.step for span in mine if span.name == "step"] == [*steps]
        assert [span.step for span in mine if span.name == "input"] == [*steps]
        assert sum(span.count for span in mine if span.name == "window") == len(steps)
    windows = [(span.step, span.count) for span in spans if span.name == "window"]
    assert windows == [(4, 4), (8, 4), (12, 4), (14, 2)]
    for window in (span for span in spans if span.name == "window"):
        first = window.step - window.count
        mine = [span for span in spans if first < span.step <= window.step]
        for name, total in (("step", window.step_s), ("input", window.input_wait_s)):
            assert sum(s.duration_s for s in mine if s.name == name) == pytest.approx(
                total, abs=1e-4
            )


def test_evaluations_and_checkpoints_are_told_with_their_steps(stopped_and_done):
    found = Counter((span.name, span.step) for span in read(stopped_and_done))
    assert {step for name, step in found if name == "evaluation"} == {6, 8, 12, 14}
    assert {5, 8, 10, 14} <= {step for name, step in found if name == "checkpoint_write"}
    assert {5, 8, 10, 14} <= {step for name, step in found if name == "checkpoint_held"}


def test_steps_do_not_overlap_with_what_stands_between_them(stopped_and_done):
    names = ("input", "step", "evaluation", "checkpoint_held", "rollback")
    spans = [span for span in read(stopped_and_done) if span.name in names]
    spans.sort(key=lambda span: (span.attempt, span.began))
    for one, other in itertools.pairwise(spans):
        if one.attempt == other.attempt:
            assert other.began >= one.ended - 1e-4, (one, other)


def test_the_file_fits_its_schema_and_the_run_is_whole(stopped_and_done):
    for line in (stopped_and_done / SPANS_FILE).read_text().splitlines():
        SpanLine.model_validate(json.loads(line))
    assert check_run(open_folder(stopped_and_done), is_thorough=True) == []
    (stopped_and_done / SPANS_FILE).open("a").write('{"name": "nap", "step": 1}\n')
    faults = [fault.text for fault in check_run(open_folder(stopped_and_done))]
    assert any("line" in text and "name" in text for text in faults), faults
