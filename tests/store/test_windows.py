"""Sketches of a run: the same bits after any kills, rollbacks and merges of ranks."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from store.record.sketches import QuantileSketch
from store.record.windows import (
    SKETCHES_FILE,
    QuantileWriter,
    RunSketches,
    format_sketches,
    merge_by_name,
    parse_sketches,
)

EVERY = 10


def compute_value(step: int) -> float:
    """Compute the number of a step, the same whenever it is computed."""
    return random.Random(step).lognormvariate(-2, 1)


def read_whole(folder: Path) -> dict:
    return json.loads((folder / SKETCHES_FILE).read_text())["whole"]


def sketch(steps: range) -> dict:
    """Return the sketch of these steps."""
    found = QuantileSketch()
    found.add([compute_value(step) for step in steps])
    return found.to_json()


def run(folder: Path, first: int, last: int, checkpoints: list[int], draw: random.Random) -> None:
    """Steps of a program that keeps two checkpoints, and may write the file at any log point."""
    keeper = QuantileWriter(0.01, first, folder, tuple(checkpoints))
    for step in range(first + 1, last + 1):
        keeper.add("step_s", compute_value(step))
        if draw.random() < 0.1:
            keeper.write(step)
        if step % EVERY == 0:
            keeper.cut(step)
            keeper.save(step, tuple(checkpoints))
            checkpoints.append(step)
            del checkpoints[:-2]


@pytest.mark.parametrize("seed", range(20))
def test_a_killed_run_counts_every_step_once(tmp_path, seed):
    draw, checkpoints, first = random.Random(seed), [], 0
    for _ in range(draw.randrange(1, 6)):
        run(tmp_path, first, first + draw.randrange(1, 35), checkpoints, draw)
        # One of those that stand: a person may choose the older one.
        first = draw.choice(checkpoints) if checkpoints else 0
        checkpoints[:] = [step for step in checkpoints if step <= first]
    run(tmp_path, first, 120, checkpoints, draw)
    told = json.loads((tmp_path / SKETCHES_FILE).read_text())
    assert told["whole"] == {"step_s": sketch(range(1, 121))}
    assert (told["from_step"], told["to_step"]) == (0, 120)
    assert len(told["windows"]) <= 4


def test_a_rollback_drops_later_windows(tmp_path):
    keeper = QuantileWriter(0.01, 0, tmp_path)
    for step in range(1, 27):
        keeper.add("step_s", compute_value(step))
        if step in (10, 20):
            keeper.cut(step)
            keeper.save(step, ())
    keeper.go_back(20)
    keeper.write(20)
    assert read_whole(tmp_path) == {"step_s": sketch(range(1, 21))}
    keeper.go_back(10)
    keeper.add("step_s", compute_value(11))
    keeper.write(11)
    assert read_whole(tmp_path) == {"step_s": sketch(range(1, 12))}


def test_windows_end_only_where_a_rollback_may_restart():
    sketches = RunSketches(0.01)
    for step in (10, 20, 30, 40):
        sketches.add("step_s", [compute_value(step)])
        sketches.cut(step, (20,))
    assert [one.to_step for one in sketches.windows] == [20, 40]
    assert sketches.go_back(20)
    assert not sketches.go_back(10)


@pytest.mark.parametrize("seed", range(5))
def test_ranks_merge_bit_for_bit_in_any_order(seed):
    draw, parts = random.Random(seed), []
    for rank in range(6):
        keeper = QuantileWriter(0.01, 0)
        for step in range(100):
            keeper.add("step_s", compute_value(100 * rank + step))
            keeper.add("input_wait_s", compute_value(step) if rank % 2 else 0.0)
        parts.append(keeper.hand_over())
        assert keeper.hand_over() == {}
    writer = QuantileWriter(0.01, 0)
    writer.take_over(draw.sample(parts, len(parts)))
    writer.cut(100)
    assert writer.sketches.merge()["step_s"].to_json() == sketch(range(600))
    assert writer.sketches.merge()["input_wait_s"].count == 600


def test_written_windows_are_read_back(tmp_path):
    sketches = RunSketches(0.02, 5)
    for step in (7, 9):
        sketches.add("a", [1.0, float("inf"), -2.0 * step])
        sketches.cut(step, (7, 9))
    text = format_sketches(0.02, 5, sketches.windows)
    found = parse_sketches(text)
    assert (found.epsilon, found.from_step) == (0.02, 5)
    assert format_sketches(0.02, 5, found.windows) == text
    for cut in range(len(text) - 1):
        assert parse_sketches(text[:cut]) is None


@pytest.mark.parametrize(
    ("step", "epsilon", "text", "why"),
    [
        (10, 0.02, None, "quantile.epsilon 0.01"),
        (15, 0.01, None, "do not reach back"),
        (10, 0.01, "{", "damaged"),
        (10, 0.01, '{"epsilon": 9, "from_step": 0}', "damaged"),
    ],
)
def test_sketches_that_cannot_continue_restart_with_a_warning(
    tmp_path, caplog, step, epsilon, text, why
):
    keeper = QuantileWriter(0.01, 0, tmp_path)
    keeper.add("step_s", 1.0)
    keeper.cut(10)
    keeper.save(10, ())
    if text is not None:
        (tmp_path / SKETCHES_FILE).write_text(text)
    again = QuantileWriter(epsilon, step, tmp_path)
    assert [record.message for record in caplog.records if why in record.message]
    again.add("step_s", 2.0)
    again.write(step + 1)
    told = json.loads((tmp_path / SKETCHES_FILE).read_text())
    assert (told["from_step"], told["epsilon"]) == (step, epsilon)
    assert merge_by_name([parse_sketches(json.dumps(told)).merge()])["step_s"].count == 1


def test_a_failing_disk_is_reported_once_and_stops_nothing(tmp_path, caplog):
    keeper = QuantileWriter(0.01, 0, tmp_path / "nowhere")
    for step in (1, 2, 3):
        keeper.add("step_s", 1.0)
        keeper.cut(step)
        keeper.save(step, ())
        keeper.write(step)
    assert [record.message.endswith("without it") for record in caplog.records] == [True]
