"""`python -m tools.plan`: against published speeds, the compiler's verdicts and finished runs."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import yaml

from bill.plan_load import measure_load
from bill.published import PUBLISHED, find_range
from store.quality.bill import PUBLISHED_RATIOS
from store.quality.slices import (
    PUBLISHED_FACTORS,
    Assumptions,
    count_time,
    list_slices,
    plan_slices,
)
from tests.support.published_loads import create_published_load
from tests.support.stored_runs import make_run
from tools.plan.__main__ import main
from utils.config.load import load_config
from utils.generations import GENERATIONS

ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "configs" / "imagenet" / "resnet50.yaml")
DIGITS = str(ROOT / "configs" / "digits_student.yaml")
VERDICT = re.compile(
    r"#\s+(v\w+)-(\d+), (\d+) images a \w+: fits \(([\d.]+) of .* step \d+ to (\d+) ms"
)


def show(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_the_ranges_are_those_of_published_steps():
    spans = []
    for row in PUBLISHED:
        counted_s, _ = count_time(
            create_published_load(row.name), GENERATIONS[row.generation], row.examples
        )
        spans.append([step_ms / 1000 / counted_s for step_ms in row.step_ms])
    mean = math.exp(sum(math.log(low * high) / 2 for low, high in spans) / len(spans))
    told = (min(low for low, _ in spans), mean, max(high for _, high in spans))
    assert told == pytest.approx(PUBLISHED_FACTORS, abs=0.005)
    assert find_range("estimate") == pytest.approx(PUBLISHED_RATIOS, abs=0.005)


@pytest.mark.parametrize(
    ("name", "optimizer", "state"), [("flax ResNet-50", "sgd", 3), ("flax ResNet-50", "adamw", 4)]
)
def test_the_state_is_weights_gradients_and_moments(name, optimizer, state):
    load = create_published_load(name, optimizer)
    weights = 25_557_032 * 4
    assert load.state_bytes == pytest.approx(state * weights, rel=0.01)
    assert load.checkpoint_bytes == pytest.approx((state - 1) * weights, rel=0.01)


@pytest.mark.parametrize("name", ["imagenet/vit_s16_90ep", "imagenet/resnet50_patient"])
def test_counts_agree_with_the_compilers_verdicts(name):
    """Verdicts stand in the header of the recipe: memory within a third, time within the range."""
    path = ROOT / "configs" / f"{name}.yaml"
    config = load_config(["--config", str(path)])
    load = measure_load(config, {}, {})
    rows = VERDICT.findall(path.read_text(encoding="utf-8"))
    assert len(rows) >= 4
    for generation, _, examples, gib, step_ms in rows:
        counted_s, bound_s = count_time(load, GENERATIONS[generation], int(examples))
        estimate_s = int(step_ms) / 1000
        low, _, high = PUBLISHED_FACTORS
        assert bound_s < estimate_s
        assert low * counted_s < estimate_s < high * counted_s
        memory = (load.state_bytes + int(examples) * load.example_bytes) / 2**30
        assert memory == pytest.approx(float(gib), rel=1 / 3)


def test_a_published_run_takes_the_hours_that_it_took():
    """flax trained ResNet-50 for 100 epochs in 4.4 h on a v3-8."""
    load = measure_load(load_config(["--config", CONFIG]), {}, {})
    assert load.work.steps == 125_100
    counted_s, _ = count_time(load, GENERATIONS["v3"], load.work.batch // 8)
    low, _, high = (factor * counted_s * load.work.steps / 3600 for factor in PUBLISHED_FACTORS)
    assert low * 0.99 < 4.4 < high


def test_the_plan_names_slices_hosts_prices_and_what_it_assumes(capsys, tmp_path):
    flags = ["--store", str(tmp_path), "--max-chips", "8", "--preemptions-per-day", "24"]
    shown = show(capsys, CONFIG, *flags, "--budget", "30")
    assert "125,100 steps of 1024, 100 epochs" in shown
    for word in ("v5litepod-8", "v6e-8", "cheapest: ", "fastest: ", "USD 30 buys it: "):
        assert word in shown
    assert "assumed" in shown and "24 preemptions a day" in shown
    assert "no price is known of v4 commitment_1y" in shown
    told = json.loads(show(capsys, CONFIG, *flags, "--json"))
    rows = {row["slice"]: row for row in told["slices"]}
    bills = {bill["rental"]["term"]: bill for bill in rows["v5litepod-8"]["bills"]}
    assert bills["spot"]["preemptions"] > 0 and bills["on_demand"]["preemptions"] == 0
    assert bills["spot"]["goodput"] < bills["on_demand"]["goodput"] < 1
    assert rows["v5litepod-8"]["examples"] == 128 and rows["v5litepod-8"]["feed"] > 1
    assert told["run"]["checkpoints"] == 100
    assert "does not buy it: at the cheapest" in show(capsys, CONFIG, *flags, "--budget", "0.1")


def test_own_prices_and_a_region_change_the_bill(capsys, tmp_path):
    prices = tmp_path / "prices.yaml"
    prices.write_text("- {device: TPU v5e, since: 2026-01-01, usd_per_device_hour: 0.1}\n")
    flags = ["--slices", "v5litepod-8", "v6e-8", "--store", str(tmp_path / "runs"), "--json"]
    flags += ["--region", "europe-west4"]
    told = json.loads(show(capsys, CONFIG, *flags, "--prices", str(prices)))
    v5e, v6e = (row["bills"] for row in told["slices"])
    assert [bill["rental"]["term"] for bill in v5e] == ["own"]
    assert v5e[0]["usd"] == pytest.approx(8 * 0.1 * v5e[0]["hours"])
    assert {bill["rental"]["region"] for bill in v6e} == {"europe-west4"}
    # In the store they need no flag.
    (tmp_path / "runs").mkdir()
    prices.rename(tmp_path / "runs" / "prices.yaml")
    told = json.loads(show(capsys, CONFIG, *flags))
    assert [bill["rental"]["term"] for bill in told["slices"][0]["bills"]] == ["own"]


def test_finished_runs_of_the_store_give_times_and_pauses(capsys, tmp_path):
    """A run of the same step on 8 chips: 0.5 s a step, 300 s between attempts, 60 s to start."""
    config = load_config(["--config", CONFIG])
    values = config.model_dump(mode="json")
    lines = [
        {"step": step, "kind": "train", "attempt": 1 + step // 150, "time_s": 0.5 * step}
        for step in range(10, 301, 10)
    ]
    run = make_run(
        tmp_path, "a", config=values, lines=lines, final={"x": 1.0}, experiment="resnet50"
    )
    began, hardware = 1.79e9, '{"chip": "TPU v5e", "devices": 8}'
    (run.path / "attempts.jsonl").write_text(
        f'{{"attempt": 1, "host": "a", "pid": 1, "began": {began}, "from_step": 0, '
        f'"hardware": {hardware}}}\n{{"attempt": 1, "ended": {began + 200}, "to_step": 150, '
        f'"status": "preempted"}}\n{{"attempt": 2, "host": "a", "pid": 1, "began": '
        f'{began + 500}, "from_step": 150, "hardware": {hardware}}}\n{{"attempt": 2, "ended": '
        f'{began + 700}, "to_step": 300, "status": "complete"}}\n'
    )
    experiment = f"--run.experiment={run.path.parent.name}"
    place = ("--store", str(tmp_path), "--slices", "v5litepod-8", "v5litepod-4")
    told = json.loads(show(capsys, CONFIG, experiment, *place, "--json"))
    own, other = (row["step"] for row in reversed(told["slices"]))
    assert own["estimate_s"] == pytest.approx(0.5) and "measured in" in own["basis"]
    assert "counted" in other["basis"]
    assert any("a new machine 5 (flags, else this store's runs)" in note for note in told["notes"])


def test_digits_are_planned_from_their_own_files_or_sizes(capsys, tmp_path):
    flags = ["--store", str(tmp_path), "--slices", "v6e-1", "--json"]
    told = json.loads(show(capsys, DIGITS, *flags, "--examples", "train=1000", "eval=200"))
    assert told["run"]["steps"] == 1000 // 64 * load_config(["--config", DIGITS]).train.epochs
    assert not any("hosts:" in note and "image" not in note for note in told["notes"])


def test_a_part_that_cannot_be_counted_is_said(tmp_path):
    """Steps of several sizes have no single count: slices fit, and have no bill."""
    changes = ["--train.image_sizes={0: 160, 0.5: 224}"]
    config = load_config(["--config", CONFIG, *changes])
    load = measure_load(config, {}, {})
    assert load.train_flops is None
    plans = plan_slices(load, list_slices(8), Assumptions())
    assert all(plan.refusal or not plan.bills for plan in plans)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--slices", "v9-8"], "accelerator type 'v9-8' is not known; use"),
        (["--budget", "0"], "--budget (0) must be above 0; change it"),
        (["--budget", "nan"], "--budget (nan) must be above 0"),
        (["--max-chips", "0"], "--max-chips (0) must be at least 1"),
        (["--preemptions-per-day", "-1"], "--preemptions-per-day (-1) must be at least 0"),
        (["--preemptions-per-day", "nan"], "--preemptions-per-day (nan) must be at least 0"),
        (["--region", "us-centrall"], "--region (us-centrall) is not in the list of prices"),
        (["--prices", "/nowhere.yaml"], "--prices /nowhere.yaml cannot be read"),
        (["--examples", "train=x"], "--examples ('train=x') is not NAME=NUMBER"),
        (["--examples", "train=9"], "--examples needs train and eval, got train; give both"),
        (["--assume", "classes=9"], "classes is not a size of train.task=classify"),
        (["--data.name=imagenet2013"], "or give --examples train=N eval=N"),
        (["--optim.lrr=1"], "did you mean"),
        (["--cpu-ms", "-2"], "--cpu-ms (-2) must be above 0"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(flags, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([CONFIG, "--store", str(tmp_path / "runs"), *flags]) == 2
    shown = capsys.readouterr()
    assert words in shown.err and shown.err.count("\n") == 1 and not shown.out
    assert not list(tmp_path.iterdir())


def test_a_missing_configuration_is_one_line(capsys):
    assert main(["configs/none.yaml"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_prices_of_a_wrong_form_are_one_line(capsys, tmp_path):
    path = tmp_path / "prices.yaml"
    path.write_text(yaml.safe_dump({"v5e": 1.0}))
    assert main([CONFIG, "--prices", str(path)]) == 2
    assert "write a list of" in capsys.readouterr().err
