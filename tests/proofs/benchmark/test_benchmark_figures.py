"""The arithmetic of the benchmark: figures from records, FLOPs, peaks, comparisons."""

from __future__ import annotations

from pathlib import Path

import pytest

from datasets import create_loader
from job.check import check
from proofs.benchmark.loop import Block, Record, summarise
from proofs.benchmark.report import write_csv
from store.quality.gates import parse_gate
from store.quality.report_gates import check_reports, make_default_gates
from store.quality.reports import read_report
from tasks.classify.task import Classify
from tasks.teachers.taught import count_flops
from tests.support.tiny_parts import CLASSES, VIT_ARGS, create_config
from utils.config.load import RunConfig
from utils.errors import UserError
from utils.generations import LAUNCHED
from utils.runtime.peaks import PEAK_TFLOPS, get_peak_tflops, name_hardware

FACTS = {
    "global_batch_size": 8,
    "steps": 2,
    "devices": 2,
    "unit": "img",
    "units_per_example": 1,
    "peak_tflops": 1e-9,
    "flops_per_example": {"student": 3.0, "teachers": 1.0, "total": 4.0},
}


def create_record(walls: list[float], waits: list[float], **facts: float) -> Record:
    blocks = [
        Block(wall, 2 * wall, wait, [wall / 4, 3 * wall / 4], (wall / 2, wall))
        for wall, wait in zip(walls, waits, strict=True)
    ]
    return Record(warmup_s=[1.0] * 5, blocks=blocks, **facts)


def create_report(**changes: float) -> dict:
    """A report with planted figures."""
    result = {
        "processes": 1,
        "devices": 1,
        "hardware": "CPU",
        "global_batch_size": 8,
        "img_per_s": 100.0,
        "img_per_s_repeats": [100.0],
        "graphs": 3,
        "graphs_measured": 0,
        "peak_host_gib": 1.0,
        "peak_device_gib": None,
        "flops_per_example": None,
    }
    return {
        "schema": 1,
        "created": "now",
        "environment": {"git_commit": "abc", "packages": {}},
        "settings": {"input": "synthetic"},
        "config": {
            "model": {"name": "vit"},
            "run": {"run_id": "a"},
            "runtime": {"num_processes": None},
        },
        "results": [{**result, **changes}],
    }


def test_a_block_is_as_long_as_on_its_slowest_rank():
    records = [
        create_record([1.0, 4.0, 2.0], [0.0, 1.0, 0.0], graphs=2, compile_s=3.0, host_rss_gib=1.0),
        create_record([2.0, 1.0, 1.0], [0.0, 0.0, 2.0], graphs=3, compile_s=1.0, host_rss_gib=2.0),
    ]
    found = summarise(records, FACTS)
    assert found["img_per_s_repeats"] == [16 / 2.0, 16 / 4.0, 16 / 2.0]
    assert found["img_per_s"] == 8.0
    assert found["input_stall_share"] == pytest.approx((1.0 + 2.0) / 2 / (2 + 4 + 2))
    assert (found["graphs"], found["compile_s"], found["peak_host_gib"]) == (3, 3.0, 2.0)
    assert found["peak_device_gib"] is None
    # 8 img/s x 4 FLOPs on 2 devices of 1000 FLOP/s each.
    assert found["mfu"] == pytest.approx(8 * 4 / (2 * 1000))
    assert found["step_p50_s"] == pytest.approx((0.75 + 1.0) / 2)
    assert 1.5 < found["step_p95_s"] < 3.0


def test_an_unknown_peak_gives_no_mfu():
    record = create_record([1.0], [0.0])
    assert summarise([record], {**FACTS, "peak_tflops": None})["mfu"] is None
    assert summarise([record], {**FACTS, "flops_per_example": None})["mfu"] is None


def test_the_engine_to_bare_ratio_is_a_median_of_pairs():
    record = create_record([1.0, 4.0, 9.0], [0.0] * 3)
    for block, bare in zip(record.blocks, (1.0, 2.0, 3.0), strict=True):
        block.bare = (bare, 4.0)
    found = summarise([record], FACTS)
    assert found["engine_over_bare_repeats"] == [1.0, 2.0, 3.0]
    assert (found["engine_over_bare"], found["engine_over_bare_cpu"]) == (2.0, 2.0)
    assert found["engine_over_bare_fastest"] == 1.0
    assert found["bare_step_s"] == 1.0


def count(config: RunConfig) -> dict[str, float]:
    """FLOPs as the benchmark counts them, of a run's own task."""
    facts = check(config).facts
    loaders = {
        role: create_loader(config.data, role, seed=0, known=config.model.known_sizes)
        for role in ("train", "eval")
    }
    return count_flops(config, facts, Classify(config, facts, loaders))


def test_flops_of_a_vit_equal_those_of_its_products(tmp_path):
    config = create_config(tmp_path)
    width, patches, patch_values = VIT_ARGS["embed_dim"], 4, 16
    tokens = patches + 1
    embed = 2 * patches * patch_values * width
    linear = 2 * tokens * width * (3 * width + width + 8 * width)
    attention = 2 * 2 * tokens * tokens * width
    head = 2 * width * CLASSES
    # Backward costs twice the forward, but images get no gradient.
    expected = 2 * embed + 3 * (linear + attention + head)
    found = count(config)
    assert found == {"student": expected, "teachers": 0.0, "total": expected}


def test_the_students_average_as_teacher_costs_a_forward_pass(tmp_path):
    flags = ("--distill.teacher=ema", "--train.ema=true", "--distill.loss=kd")
    config = create_config(tmp_path, *flags)
    found = count(config)
    patches = 2 * 4 * 16 * VIT_ARGS["embed_dim"]
    assert found["teachers"] == (found["student"] + patches) / 3


def test_a_peak_is_found_by_name_and_type_or_is_none():
    assert get_peak_tflops("TPU v5e", "bf16") == 197.0
    assert get_peak_tflops("TPU v5e", "fp32") is None
    assert get_peak_tflops("NVIDIA H200", "fp32", tf32=True) == 494.0
    assert get_peak_tflops("NVIDIA H200", "fp32") == 67.0
    assert get_peak_tflops("NVIDIA H200 MIG 1g.18gb", "bf16") is None
    assert get_peak_tflops("CPU", "bf16") is None
    assert all(f"TPU {one.name}" in PEAK_TFLOPS for one in LAUNCHED)


def test_a_tpu_is_named_after_its_chips(tmp_path):
    for number, (vendor, device) in enumerate([("0x8086", "0x0063"), ("0x1ae0", "0x006f")]):
        folder = tmp_path / f"0000:00:0{number}.0"
        folder.mkdir()
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "device").write_text(f"{device}\n")
    assert name_hardware("TPU", tmp_path) == "TPU v6e"
    # v2 and v3 cannot be told apart.
    (tmp_path / "0000:00:01.0/device").write_text("0x0027\n")
    assert name_hardware("TPU", tmp_path) == "TPU"
    assert name_hardware("TPU", tmp_path / "none") == "TPU"
    assert name_hardware("NVIDIA H200", tmp_path) == "NVIDIA H200"


@pytest.mark.parametrize(
    ("changes", "regressed"),
    [
        ({}, []),
        ({"img_per_s": 95.5}, []),
        ({"img_per_s": 94.5}, ["img_per_s"]),
        ({"img_per_s": 200.0}, []),
        ({"peak_host_gib": 1.06}, ["peak_host_gib"]),
        ({"peak_host_gib": 0.5}, []),
        ({"graphs": 4}, ["graphs"]),
        ({"graphs": 2}, []),
        ({"img_per_s": 10.0, "graphs": 9}, ["img_per_s", "graphs"]),
    ],
)
def test_a_figure_may_be_worse_by_the_tolerance(changes, regressed):
    assert find_outcomes(create_report(**changes), create_report(), "fail") == regressed


def find_outcomes(new: dict, base: dict, outcome: str, *gates: str) -> list[str]:
    """List figures whose gates have this outcome."""
    wanted = [parse_gate(gate) for gate in gates] or make_default_gates((base, new), 5.0)
    found = check_reports(wanted, base, new)
    return [one.gate.metric.removeprefix("1 x ") for one in found if one.outcome == outcome]


def test_a_missing_figure_is_a_finding():
    old, new = create_report(engine_over_bare=1.01), create_report(engine_over_bare=1.2)
    assert find_outcomes(new, old, "fail") == ["engine_over_bare"]
    for pair in ((new, create_report()), (create_report(), new)):
        assert find_outcomes(*pair, "fail") == ["engine_over_bare"]
    gates = ("peak_device_gib:5:-:major", "peak_device_gib:5:-:major?")
    assert find_outcomes(new, old, "fail", gates[0]) == ["peak_device_gib"]
    assert find_outcomes(new, old, "skipped", gates[1]) == ["peak_device_gib"]
    other = create_report()
    other["results"].append({**other["results"][0], "processes": 2})
    assert "2 x img_per_s" in find_outcomes(other, create_report(), "fail")


def test_widely_differing_blocks_leave_a_figure_undecided():
    """By their mean it is 6 % slower; an aggregate decides as single numbers do."""
    old = create_report(img_per_s_repeats=[90.0, 100.0, 110.0])
    noisy = create_report(img_per_s=94.0, img_per_s_repeats=[84.0, 94.0, 104.0])
    slow = create_report(img_per_s=70.0, img_per_s_repeats=[69.0, 70.0, 71.0])
    assert find_outcomes(noisy, old, "undecided") == ["img_per_s"]
    assert find_outcomes(slow, old, "fail") == ["img_per_s"]
    assert find_outcomes(noisy, old, "fail", "img_per_s@median:5:-:major") == ["img_per_s"]
    assert find_outcomes(noisy, old, "pass", "1 x img_per_s@best:6:-:major") == ["img_per_s"]
    with pytest.raises(UserError, match="did you mean 'img_per_s'"):
        find_outcomes(old, old, "fail", "img_per_sec:1:-:major")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r["config"]["model"].update(name="resnet"), "model.name is 'vit' now"),
        (lambda r: r["settings"].update(input="real"), "--input"),
        (lambda r: r["results"][0].update(hardware="TPU v5e"), "hardware"),
        (lambda r: r["results"][0].update(global_batch_size=16), "global_batch_size"),
        (lambda r: r["results"][0].update(processes=4), "processes"),
    ],
)
def test_reports_of_different_things_are_not_compared(change, words):
    base = create_report()
    change(base)
    with pytest.raises(UserError, match=words):
        find_outcomes(create_report(), base, "fail")


def test_names_of_runs_and_numbers_of_processes_may_differ():
    base = create_report()
    base["config"]["run"]["run_id"] = "other"
    base["config"]["runtime"]["num_processes"] = 2
    assert find_outcomes(create_report(), base, "fail") == []


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 99}', "{"])
def test_a_file_other_than_a_report_is_refused(tmp_path, text):
    path = tmp_path / "base.json"
    path.write_text(text)
    with pytest.raises(UserError, match="--compare"):
        read_report(path, "--compare")


def test_the_table_file_has_a_line_for_each_measurement(tmp_path: Path):
    report = create_report()
    report["results"].append({**report["results"][0], "processes": 2, "scaling_efficiency": 0.9})
    path = tmp_path / "report.csv"
    write_csv(report, path)
    header, one, two = path.read_text().splitlines()
    assert "scaling_efficiency" in header and "git_commit" in header and "config" in header
    assert "0.9" in two and "0.9" not in one
