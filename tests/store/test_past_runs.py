"""What a store says of a run to come: `main.py --check` and `tools.sweep plan` on real files."""

from __future__ import annotations

import copy

import pytest

import main
from store.quality.bill import PUBLISHED_RATIOS, StepTime
from store.quality.past_runs import list_complete, read_past_runs
from store.quality.trends import keep_report
from tests.store.test_calibration import make_tpu_run, make_verdict
from tests.support.tiny_parts import create_argv
from tools.sweep import sum_bills
from utils.config.load import load_config


def get_values(root, batch: int = 16) -> dict:
    argv = create_argv(root, f"--data.global_batch_size={batch}")
    return load_config(argv).model_dump(mode="json")


def check(capsys, root) -> str:
    assert main.main(create_argv(root, "--check")) == 0
    (bill,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("bill: "))
    return bill


def calibrate_store(root, *ratios: float) -> None:
    """Keep verdicts on the step for a v5e with 16 and with 8 examples, and runs of the second."""
    for batch in (16, 8):
        keep_report(root, make_verdict(get_values(root, batch), examples_per_chip=batch))
    for number, ratio in enumerate(ratios):
        make_tpu_run(root, f"a{number}", copy.deepcopy(get_values(root, 8)), step_s=0.04 * ratio)


def test_measured_steps_are_those_of_equal_runs_by_their_devices(tmp_path, capsys):
    counted = check(capsys, tmp_path)
    assert "counted FLOPs and bytes, range of published steps" in counted
    for name, devices, batch in (("a", 1, 16), ("b", 8, 16), ("c", 4, 8)):
        values = copy.deepcopy(get_values(tmp_path, batch))
        make_tpu_run(tmp_path, name, values, step_s=0.5, devices=devices)
    past = read_past_runs(str(tmp_path), get_values(tmp_path))
    assert past.measured == {
        ("v5e", 1): (pytest.approx(0.5), "digits/a"),
        ("v5e", 8): (pytest.approx(0.5), "digits/b"),
    }


def test_a_measured_bill_has_no_range(tmp_path, capsys):
    make_tpu_run(tmp_path, "b", copy.deepcopy(get_values(tmp_path)), step_s=1e-9)
    bill = check(capsys, tmp_path)
    cheapest = bill.partition("; fastest")[0]
    assert "cheapest: v5litepod-1 " in cheapest and "(measured in digits/b)" in cheapest
    assert "bound" not in cheapest


def test_a_calibration_of_the_chip_gives_the_range_of_a_check(tmp_path, capsys):
    calibrate_store(tmp_path, 1.0, 1.5, 2.0)
    past = read_past_runs(str(tmp_path), get_values(tmp_path))
    assert set(past.calibrations) == {"v5e"}
    (key,) = (key for key in past.verdicts if key[2] == 16)
    step = StepTime.by_compiler(past.verdicts[key], past.calibrations)
    times = (step.low_s, step.estimate_s, step.high_s)
    assert times == pytest.approx((0.04, 0.06, 0.08))
    assert "calibrated by 3 runs here on v5e" in check(capsys, tmp_path)


def test_few_runs_do_not_narrow_the_range_of_published_steps(tmp_path):
    calibrate_store(tmp_path, 1.1)
    past = read_past_runs(str(tmp_path), get_values(tmp_path))
    verdict = next(iter(past.verdicts.values()))
    step = StepTime.by_compiler(verdict, past.calibrations)
    low, high = PUBLISHED_RATIOS
    times = (step.low_s, step.estimate_s, step.high_s)
    assert times == pytest.approx((0.04 * low, 0.04 * 1.1, 0.04 * high))
    assert step.basis.endswith("calibrated by 1 run here on v5e")
    other = StepTime.by_compiler({**verdict, "target": "v6e:2x2"}, past.calibrations)
    assert other.basis.endswith("range of published steps") and other.estimate_s == 0.04


def test_a_damaged_run_hides_no_other(tmp_path):
    make_tpu_run(tmp_path, "a", copy.deepcopy(get_values(tmp_path)), step_s=0.05)
    broken = make_tpu_run(tmp_path, "b", copy.deepcopy(get_values(tmp_path)), step_s=0.05)
    (tmp_path / "digits" / "b" / "run.json").write_text("{")
    assert [record.path for record in list_complete(str(tmp_path), "tiny")] == ["digits/a"]
    assert broken.path == "digits/b"
    assert list_complete("gs://bucket/runs", "tiny") == []


def test_a_sweep_sums_the_bills_of_its_trials_with_their_ranges():
    bill = {"slice": "v6e-1", "term": "own", "basis": "measured in digits/a"}
    bill |= {"hours": 2.0, "low_hours": 1.0, "high_hours": 4.0}
    bill |= {"usd": 6.0, "low_usd": 3.0, "high_usd": 12.0}
    other = {**bill, "slice": "v6e-4", "basis": "counted", "high_usd": 20.0}
    total = sum_bills([bill, other])
    assert (total["usd"], total["low_usd"], total["high_usd"]) == (12.0, 6.0, 32.0)
    assert (total["hours"], total["high_hours"], total["trials"]) == (4.0, 8.0, 2)
    assert total["basis"] == "counted, measured in digits/a" and total["term"] == "own"
    assert sum_bills([bill, None]) is None
