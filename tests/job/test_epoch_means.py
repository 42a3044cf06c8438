"""Lines of epochs: means, seconds and examples from the lines of training, whatever was killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import main
from job.metric_writer import MetricWriter
from store.compare.divergence import find_divergence, read_lines
from store.query.record import RunRecord, get_last_values, read_tail
from store.query.schemas import MetricLine
from store.record.catalogue import EPOCH, EVAL, KINDS, TRAIN
from store.record.epoch_means import EpochMeans
from store.record.history import keep_deterministic, keep_until, read_metrics
from tests.support.tiny_parts import create_argv

STEPS_PER_EPOCH, STEPS, BATCH = 4, 11, 8


def write_run(folder: Path, log_every: int, first: int = 0, last: int = STEPS) -> list[dict]:
    """Write the lines of steps after `first`, as the loop does; gives all lines of the run."""
    folder.mkdir(exist_ok=True)
    epochs = EpochMeans(STEPS_PER_EPOCH, BATCH)
    writer = MetricWriter(folder, first_step=first, epochs=epochs)
    if first and first % STEPS_PER_EPOCH == 0:
        writer.write(first, EVAL, {"top1": float(first)})
    for step in range(first + 1, last + 1):
        if step % log_every == 0 or step == STEPS:
            writer.write(step, TRAIN, {"loss/total": float(step), "lr": 1.0, "time_s": 1.0})
        if step % STEPS_PER_EPOCH == 0:
            writer.write(step, EVAL, {"top1": float(step)})
    writer.close()
    return read_metrics(folder, KINDS)


def get_epochs(lines: list[dict]) -> list[dict]:
    return [line for line in lines if line["kind"] == EPOCH]


@pytest.mark.parametrize(
    ("log_every", "wanted"),
    [
        # step, mean, examples
        (1, [(4, 2.5, 32), (8, 6.5, 32)]),
        (2, [(4, 3.0, 32), (8, 7.0, 32)]),
        (3, [(4, 3.0, 24), (8, 6.0, 24)]),
        (5, [(8, 5.0, 40)]),  # the first epoch has no log point
    ],
)
def test_an_epoch_has_the_means_of_its_log_points(tmp_path, log_every, wanted):
    lines = write_run(tmp_path, log_every)
    epochs = get_epochs(lines)
    assert [(e["step"], e["loss/total"], e["examples"]) for e in epochs] == wanted
    assert [e["epoch"] for e in epochs] == [e["step"] / STEPS_PER_EPOCH for e in epochs]
    assert all("lr" not in e for e in epochs)
    # Behind what it summarises, before the evaluation of its step.
    order = {TRAIN: 0, EPOCH: 1, EVAL: 2}
    places = [(line["step"], order[line["kind"]]) for line in lines]
    assert places == sorted(places)


def test_seconds_are_those_between_last_log_points(tmp_path):
    writer = MetricWriter(tmp_path, epochs=EpochMeans(2, BATCH))
    for step, time_s in ((1, 1.0), (2, 3.0), (3, 7.5), (4, 8.0)):
        writer.write(step, TRAIN, {"loss/total": 0.0, "time_s": time_s})
    writer.close()
    assert [line["epoch_s"] for line in get_epochs(read_metrics(tmp_path, KINDS))] == [3.0, 5.0]


@pytest.mark.parametrize("log_every", [1, 2, 3, 5])
@pytest.mark.parametrize("resumed_at", range(1, STEPS))
def test_a_resumed_run_has_the_lines_of_an_unbroken_one(tmp_path, log_every, resumed_at):
    whole = write_run(tmp_path / "whole", log_every)
    for killed_at in (resumed_at, min(resumed_at + 4, STEPS)):
        folder = tmp_path / str(killed_at)
        write_run(folder, log_every, 0, killed_at)
        lines = write_run(folder, log_every, resumed_at)
        assert list(map(keep_deterministic, lines)) == list(map(keep_deterministic, whole))


def test_a_rolled_back_run_repeats_its_epoch(tmp_path):
    writer = MetricWriter(tmp_path, epochs=EpochMeans(2, BATCH))
    for step in (1, 2, 3):
        writer.write(step, TRAIN, {"loss/total": float(step)})
    writer.rewind(1)
    writer.write(2, TRAIN, {"loss/total": 5.0})
    writer.close()
    assert [(e["step"], e["loss/total"]) for e in get_epochs(read_metrics(tmp_path, KINDS))] == [
        (2, 3.0)
    ]


def test_a_missing_or_infinite_value_is_left_out_of_the_mean(tmp_path):
    writer = MetricWriter(tmp_path, epochs=EpochMeans(3, BATCH))
    writer.write(1, TRAIN, {"loss/total": 1.0, "grad_norm": float("inf")})
    writer.write(2, TRAIN, {"lr": 1.0})  # a skipped step
    writer.write(3, TRAIN, {"loss/total": 2.0, "grad_norm": 4.0})
    writer.close()
    (epoch,) = get_epochs(read_metrics(tmp_path, KINDS))
    assert (epoch["loss/total"], epoch["grad_norm"]) == (1.5, 4.0)


def test_time_goes_on_behind_an_evaluation(tmp_path):
    """The last line that is kept may be one of an evaluation, which has no time."""
    writer = MetricWriter(tmp_path)
    writer.write(1, TRAIN, {"time_s": 5.0})
    writer.write(2, EVAL, {"top1": 1.0})
    writer.close()
    writer = MetricWriter(tmp_path, first_step=3)
    writer.write(4, TRAIN, {"time_s": 1.0})
    writer.close()
    assert read_metrics(tmp_path, KINDS)[-1]["time_s"] == 6.0


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of three epochs, resumed behind the first."""
    folder = tmp_path_factory.mktemp("epochs")
    flags = ("--run.run_id=a", "--train.log_every_steps=1", "--train.checkpoint_every_steps=3")
    assert main.main(create_argv(folder, *flags, "--train.epochs=1")) == 0
    path = folder / "tiny" / "a"
    flags = (*flags, "--train.epochs=3", f"--resume={path}")
    assert main.main(create_argv(folder, *flags)) == 0
    return path


def test_a_runs_epochs_are_the_means_of_its_lines(run):
    lines = read_metrics(run, KINDS)
    epochs, start = get_epochs(lines), 0
    assert [line["epoch"] for line in epochs] == [1, 2, 3]
    for epoch in epochs:
        mine = [x for x in lines if x["kind"] == TRAIN and start < x["step"] <= epoch["step"]]
        assert epoch["loss/total"] == pytest.approx(sum(x["loss/total"] for x in mine) / len(mine))
        assert epoch["grad_norm"] == pytest.approx(sum(x["grad_norm"] for x in mine) / len(mine))
        assert epoch["epoch_s"] > 0 and epoch["examples"] % len(mine) == 0
        start = epoch["step"]
    assert sum(x["epoch_s"] for x in epochs) == pytest.approx(
        [x for x in lines if x["kind"] == TRAIN][-1]["time_s"]
    )
    for line in lines:
        MetricLine.model_validate(line)


def test_readers_take_no_epoch_for_a_step(run, tmp_path):
    record = RunRecord(run)
    lines = read_metrics(run, KINDS)
    without = [line for line in lines if line["kind"] != EPOCH]
    assert list(read_lines(record)) == without == read_metrics(run)
    assert find_divergence(read_lines(record), without) is None
    assert get_last_values(lines) == get_last_values(without)
    tail = tmp_path / "metrics.jsonl"
    many = [{**line, "kind": EPOCH, "step": n} for n, line in enumerate(lines[:1] * 5000)]
    head = [{"step": 0, "kind": EVAL, "top1": 7.0}]
    last = [{"step": 5000, "kind": TRAIN, "loss/total": 1.0}]
    tail.write_text("".join(json.dumps(line) + "\n" for line in [*head, *many, *last]))
    assert get_last_values(read_tail(tail))["eval.top1"] == 7.0
    step = get_epochs(lines)[0]["step"]
    assert [x["kind"] for x in keep_until(lines, step) if x["step"] == step] == [TRAIN, EPOCH]
