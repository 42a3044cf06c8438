"""Metrics that a run measures, and the file that it writes."""

from __future__ import annotations

import json

import pytest

from job.curves import draw_curves, draw_run, read_curve
from job.metric_writer import LostRunError, MetricWriter
from store.record.history import read_metrics
from tests.support.tiny_parts import create_cpu_runtime
from utils.endings import GraphBudgetError
from utils.errors import UserError
from utils.metrics import LoopMeter


class CountingRuntime:
    """Counters that a test sets."""

    def __init__(self) -> None:
        self.now = {"graphs": 3, "host_reads": 7, "host_ops": 0}
        self.instruments = create_cpu_runtime().instruments

    def counters(self) -> dict[str, int]:
        return dict(self.now)


def create_meter(budget: int = 8) -> tuple[LoopMeter, CountingRuntime]:
    runtime = CountingRuntime()
    return LoopMeter(runtime, budget, 10, "img"), runtime


def test_graphs_and_host_reads_are_counted_by_steps_and_evaluations():
    meter, runtime = create_meter()
    runtime.now["graphs"] += 1
    meter.end_step(1, 16, 0.25)
    runtime.now["host_reads"] += 2
    meter.end_step(2, 16, 0.5)
    with meter.phase("eval", 2):
        runtime.now["graphs"] += 2
        runtime.now["host_reads"] += 5
    facts = meter.take(2)
    assert (facts["graphs"], facts["graphs_train"], facts["graphs_eval"]) == (6, 1, 2)
    assert facts["host_reads"] == 2
    assert facts["input_wait_s"] == 0.75
    assert facts["epoch"] == 0.2
    assert facts["img_per_s"] > 0
    assert facts["host_rss_gib"] > 0
    following = meter.take(3)
    assert (following["host_reads"], following["input_wait_s"]) == (0, 0)
    assert following["graphs"] == 6


@pytest.mark.parametrize(("phase", "step"), [("train", 5), ("eval", 7)])
def test_exceeding_the_graph_budget_names_phase_and_step(phase, step):
    meter, runtime = create_meter(budget=4)
    runtime.now["graphs"] += 1
    meter.end_step(1, 16, 0.0)
    runtime.now["graphs"] += 1
    with pytest.raises(GraphBudgetError, match=rf"{phase} of step {step} .*graph_budget \(4\)"):
        if phase == "train":
            meter.end_step(step, 16, 0.0)
        else:
            with meter.phase("eval", step):
                pass


def test_an_exhausted_budget_is_no_error_while_nothing_compiles():
    meter, _ = create_meter(budget=3)
    for step in range(4):
        meter.end_step(step, 16, 0.0)
    assert meter.get_graphs()["graphs"] == 3


def test_a_line_is_written_at_once_and_reads_back(tmp_path):
    writer = MetricWriter(tmp_path)
    writer.write(1, "train", {"loss/total": 0.5})
    writer.write(2, "train", {"loss/total": float("nan"), "lr": float("inf")})
    assert read_metrics(tmp_path) == [
        {"step": 1, "kind": "train", "loss/total": 0.5},
        {
            "step": 2,
            "kind": "train",
            "loss/total": None,
            "lr": None,
            "nonfinite": {"loss/total": "nan", "lr": "inf"},
        },
    ]
    writer.close()


def test_an_unknown_metric_is_refused_before_it_is_written(tmp_path):
    writer = MetricWriter(tmp_path)
    writer.write(1, "eval", {"top1": 50.0})
    with pytest.raises(UserError, match=r"'bleu' is not in the catalogue .* store\.METRICS\.add"):
        writer.write(2, "eval", {"top1": 51.0, "bleu": 0.3})
    writer.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]


def test_every_line_is_strict_json(tmp_path):
    writer = MetricWriter(tmp_path)
    writer.write(1, "train", {"loss/total": float("nan"), "epoch": 0.1})
    writer.close()

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    json.loads(writer.path.read_text(), parse_constant=refuse)


def test_a_torn_last_line_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "kind": "train", "lr": 2.0}\n{"step": 2, "ki')
    assert read_metrics(tmp_path) == [{"step": 1, "kind": "train", "lr": 2.0}]


def test_a_resumed_run_drops_lines_after_its_checkpoint(tmp_path):
    """So does it the evaluation at that very step, which is made again."""
    lines = [
        {"step": 1, "kind": "train", "loss/total": 1.0},
        {"step": 2, "kind": "train", "loss/total": 2.0},
        {"step": 2, "kind": "eval", "top1": 3.0},
        {"step": 3, "kind": "train", "loss/total": 4.0},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "ki'
    (tmp_path / "metrics.jsonl").write_text(text)
    writer = MetricWriter(tmp_path, first_step=2)
    writer.write(3, "train", {"loss/total": 5.0})
    writer.close()
    assert read_metrics(tmp_path) == [*lines[:2], {"step": 3, "kind": "train", "loss/total": 5.0}]


def test_lines_of_unknown_form_are_left_out(tmp_path):
    text = b'{"step": 1, "lr": 2.0}\n5\n[1]\n{"lr": 1}\n{"step": "x"}\n\xff\xfe{\n{"step": 2}\n'
    (tmp_path / "metrics.jsonl").write_bytes(text)
    assert read_metrics(tmp_path) == [
        {"step": 1, "kind": "train", "lr": 2.0},
        {"step": 2, "kind": "train"},
    ]


def test_a_rolled_back_writer_drops_repeated_steps(tmp_path):
    writer = MetricWriter(tmp_path)
    for step in (1, 2, 3):
        writer.write(step, "train", {"loss/total": float(step)})
    writer.sync()
    writer.rewind(1)
    writer.write(2, "train", {"loss/total": 7.0})
    writer.close()
    lines = read_metrics(tmp_path)
    assert [(line["step"], line["loss/total"]) for line in lines] == [(1, 1.0), (2, 7.0)]


def test_a_deleted_file_is_noticed_at_the_next_line(tmp_path):
    writer = MetricWriter(tmp_path)
    writer.write(1, "train", {"loss/total": 1.0})
    writer.path.unlink()
    with pytest.raises(LostRunError, match=r"metrics.jsonl was deleted while the run"):
        writer.write(2, "train", {"loss/total": 1.0})
    writer.close()


def test_a_directory_without_metrics_is_refused(tmp_path):
    with pytest.raises(UserError, match="give the directory of a run"):
        read_metrics(tmp_path)


def test_curves_are_drawn_for_one_run_and_for_several(tmp_path):
    folders = {}
    for name in ("alone", "distilled"):
        folder = tmp_path / name
        folder.mkdir()
        writer = MetricWriter(folder)
        for step in range(1, 5):
            writer.write(step, "train", {"epoch": 0.1 * step, "loss/task": 1 / step})
        writer.write(4, "eval", {"top1": 50.0})
        writer.close()
        folders[name] = folder
    assert read_curve(folders["alone"], "train") == (
        "loss/task",
        [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25)],
    )
    assert read_curve(folders["alone"], "eval") == ("top1", [(4, 50.0)])
    one = draw_run(folders["alone"])
    both = draw_curves(folders, tmp_path / "both.png")
    assert one == folders["alone"] / "curves.png"
    for path in (one, both):
        assert path.read_bytes().startswith(b"\x89PNG")
    assert one.read_bytes() != both.read_bytes()


def test_a_run_that_logged_nothing_still_has_a_picture(tmp_path):
    MetricWriter(tmp_path).close()
    assert draw_run(tmp_path).stat().st_size > 1000


def test_a_picture_names_the_run_and_its_experiment(tmp_path, monkeypatch):
    folder = tmp_path / "digits" / "first"
    folder.mkdir(parents=True)
    writer = MetricWriter(folder)
    writer.write(1, "train", {"loss/task": 1.0})
    writer.close()
    labels = []
    monkeypatch.setattr("job.curves.draw_curves", lambda runs, path: labels.extend(runs) or path)
    draw_run(folder)
    assert labels == ["digits/first"]


def test_a_full_disk_gives_a_one_line_error(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    writer = MetricWriter(tmp_path)
    with pytest.raises(LostRunError, match=r"metrics.jsonl cannot be written: No space left"):
        writer.write(1, "train", {"loss/total": 1.0})
    writer.close()  # what the disk refused once is not said a second time
