"""Times that runs by main.py record."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import main
from job.stream import iterate_batches
from store.quality.validation import check_run
from store.query.record import RunRecord, get_finite_numbers
from store.query.schemas import SketchesFile, SpanLine
from store.record.history import read_metrics
from store.record.sketches import QuantileSketch
from store.record.spans import SPANS_FILE, Span, parse_spans
from store.record.windows import SKETCHES_FILE
from tests.support.child_runs import run_main
from tests.support.tiny_parts import create_argv
from utils.storage.places import open_folder

FLAGS = (
    "--run.run_id=a",
    "--train.log_every_steps=4",
    "--train.checkpoint_every_steps=5",
    "--train.eval_every_epochs=1",
    "--runtime.num_threads=1",
)


@pytest.fixture(scope="module")
def stopped_and_done(tmp_path_factory) -> Path:
    """A run of 8 steps that was resumed to 14."""
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


def test_evaluations_and_checkpoints_are_recorded_with_their_steps(stopped_and_done):
    found = Counter((span.name, span.step) for span in read(stopped_and_done))
    assert {step for name, step in found if name == "evaluation"} == {6, 8, 12, 14}
    assert {5, 8, 10, 14} <= {step for name, step in found if name == "checkpoint_write"}
    assert {5, 8, 10, 14} <= {step for name, step in found if name == "checkpoint_held"}


def test_spans_of_steps_and_of_pauses_do_not_overlap(stopped_and_done):
    names = ("input", "step", "evaluation", "checkpoint_held", "rollback")
    spans = [span for span in read(stopped_and_done) if span.name in names]
    spans.sort(key=lambda span: (span.attempt, span.began))
    for one, other in itertools.pairwise(spans):
        if one.attempt == other.attempt:
            assert other.began >= one.ended - 1e-4, (one, other)


def test_the_sketch_file_matches_its_schema_and_the_run_validates(stopped_and_done):
    for line in (stopped_and_done / SPANS_FILE).read_text().splitlines():
        SpanLine.model_validate(json.loads(line))
    assert check_run(open_folder(stopped_and_done), is_thorough=True) == []
    (stopped_and_done / SPANS_FILE).open("a").write('{"name": "nap", "step": 1}\n')
    faults = [fault.text for fault in check_run(open_folder(stopped_and_done))]
    assert any("line" in text and "name" in text for text in faults), faults


def read_whole(folder: Path) -> dict:
    """Sketches of the whole run by name."""
    told = json.loads((folder / SKETCHES_FILE).read_text())
    SketchesFile.model_validate(told)
    assert told["from_step"] == 0
    return told["whole"]


def sketch_lines(folder: Path) -> dict:
    """Compute the sketch of the gradient norms in the kept lines."""
    told = [get_finite_numbers(line) for line in read_metrics(folder)]
    found = QuantileSketch()
    found.add([line["grad_norm"] for line in told if "grad_norm" in line])
    return found.to_json()


def count_steps(folder: Path) -> tuple[int, int]:
    found = RunRecord(folder).sketches.merge()
    return found["step_s"].count, found["input_wait_s"].count


SAVING = (
    "--run.run_id=a",
    "--train.steps=8",
    "--train.checkpoint_every_steps=2",
    "--mixup=0.8",
    "--train.eval_every_epochs=100",
    "--train.keep_checkpoints=9",
    "--runtime.num_threads=1",
    "--train.on_nonfinite=rollback",
)


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory) -> Path:
    """A run whose sixth batch is bad: rolled back from step 6 or later to step 4."""
    output = tmp_path_factory.mktemp("gone_back")

    def spoil(parts: object, first_step: int, *more: object) -> Iterator[object]:
        for step, batch in enumerate(iterate_batches(parts, first_step, *more), start=first_step):
            for value in batch.draws.values() if step == 5 else ():
                if value.is_floating_point():
                    value.fill_(float("nan"))
            yield batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("job.callbacks.iterate_batches", spoil)
        assert main.main(create_argv(output, *SAVING)) == 0
    return output / "tiny" / "a"


def test_a_rolled_back_run_counts_only_kept_steps(rolled_back):
    whole = read_whole(rolled_back)
    assert whole["grad_norm"] == sketch_lines(rolled_back)
    assert whole["grad_norm"]["special"] == {"nan": 0, "inf": 0, "-inf": 0}
    assert count_steps(rolled_back) == (7, 7)  # one batch was drawn and dropped
    back = [span for span in read(rolled_back) if span.name == "rollback"]
    assert [(span.step, span.count) for span in back] in ([(4, 2)], [(4, 3)])


@pytest.mark.parametrize("lost", [(8,), (6, 8), (4, 6, 8)])
def test_a_resumed_run_counts_like_an_uninterrupted_one(rolled_back, tmp_path, lost):
    """From checkpoints before and after the one that it rolled back to."""
    half = tmp_path / "tiny" / "a"
    shutil.copytree(rolled_back, half)
    for step in lost:
        shutil.rmtree(half / "checkpoints" / f"step_{step:08d}")
    assert main.main(create_argv(tmp_path, *SAVING, "--resume=auto")) == 0
    assert read_whole(half)["grad_norm"] == read_whole(rolled_back)["grad_norm"]
    assert count_steps(half) == (7, 7)


@pytest.mark.slow
def test_two_ranks_count_their_steps_together(tmp_path):
    flags = (
        "--train.steps=7",
        "--train.log_every_steps=1",
        "--runtime.num_processes=2",
        "--train.checkpoint_every_steps=3",
        "--run.run_id=a",
        "--runtime.num_threads=1",
    )
    done = run_main(create_argv(tmp_path, *flags))
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "tiny" / "a"
    assert count_steps(folder) == (14, 14)
    assert read_whole(folder)["grad_norm"] == sketch_lines(folder)
    assert {span.rank for span in read(folder)} == {0}


def test_another_epsilon_starts_new_sketches(stopped_and_done, tmp_path):
    shutil.copytree(stopped_and_done, tmp_path / "tiny" / "a")
    flags = (*FLAGS, "--train.steps=16", "--resume=auto", "--quantile.epsilon=0.001")
    assert main.main(create_argv(tmp_path, *flags)) == 0
    told = json.loads((tmp_path / "tiny" / "a" / SKETCHES_FILE).read_text())
    assert (told["epsilon"], told["from_step"], told["to_step"]) == (0.001, 14, 16)
    assert sum(count for _, count in told["whole"]["step_s"]["positive"]) == 2
