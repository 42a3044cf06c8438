"""Device-hours, money by the user's price table, goodput, and the Pareto front."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from store.quality.costs import DevicePrice, compute_cost, find_front, read_prices
from store.query.record import RunRecord
from tests.support.stored_runs import make_config, make_run
from tools.runs.__main__ import main
from utils.errors import UserError

DAY = 1_790_000_000.0  # 2026-09-21


def make(root: Path, name: str, attempts: list[dict], top1: float = 50.0) -> RunRecord:
    """A run of four steps with 100 s of training, of which 10 were waits."""
    lines = [
        {
            "step": step,
            "kind": "train",
            "attempt": 1 + step // 3,
            "time_s": 25.0 * step,
            "input_wait_s": 2.0,
            "checkpoint_held_s": 0.5,
        }
        for step in range(1, 5)
    ]
    run = make_run(root, name, lines=lines, final={"eval_top1": top1})
    text = "".join(json.dumps(one) + "\n" for one in attempts)
    (run.path / "attempts.jsonl").write_text(text)
    return RunRecord(run.path)


def attempt(number: int, began: float, seconds: float | None, **hardware: object) -> list[dict]:
    start = {
        "attempt": number,
        "host": "vm",
        "pid": 1,
        "began": began,
        "from_step": 0,
        "hardware": {"hardware": "TPU v5 lite", "devices": 8, **hardware},
    }
    if seconds is None:
        return [start]
    return [start, {"attempt": number, "ended": began + seconds, "to_step": 4, "status": "x"}]


PRICES = [
    DevicePrice(device="TPU v5*", since="2026-01-01", usd_per_device_hour=2.0),
    DevicePrice(device="TPU v5*", since="2026-09-22", usd_per_device_hour=1.0),
]


def test_each_attempt_is_billed_at_the_price_of_its_day(tmp_path):
    two = attempt(1, DAY, 90.0) + attempt(2, DAY + 2 * 86400, 110.0)
    cost = compute_cost(make(tmp_path, "a", two), PRICES)
    assert (cost.paid_s, cost.is_least, cost.unpriced) == (200.0, False, ())
    assert cost.device_hours == pytest.approx(8 * 200 / 3600)
    assert cost.usd == pytest.approx(8 * (90 * 2.0 + 110 * 1.0) / 3600)
    assert cost.goodput == pytest.approx((100 - 10) / 200)
    assert compute_cost(make(tmp_path, "b", two), []).usd is None


def test_a_killed_attempt_is_billed_until_its_last_line(tmp_path):
    two = attempt(1, DAY, None) + attempt(2, DAY + 500, 60.0)
    cost = compute_cost(make(tmp_path, "a", two), PRICES)
    assert cost.is_least and cost.paid_s == 50.0 + 60.0 and cost.goodput is None


def test_a_device_without_a_price_gives_no_total(tmp_path):
    early = attempt(1, 0.0, 100.0)  # 1970
    cost = compute_cost(make(tmp_path, "a", early), PRICES)
    assert cost.usd is None and cost.unpriced == ("TPU v5 lite",)


def test_the_device_missing_in_attempts_comes_from_the_run(tmp_path):
    old = attempt(1, DAY, 100.0, device="xla:0")
    del old[0]["hardware"]["hardware"]
    record = make(tmp_path, "a", old)
    record.facts.environment["hardware"] = "TPU v5 lite"
    assert compute_cost(record, PRICES).usd == pytest.approx(8 * 100 / 3600 * 2)


def test_the_pareto_front_holds_the_undominated_points():
    points = [(1.0, 50.0), (2.0, 49.0), (3.0, 70.0), None, (3.0, 60.0), (9.0, 70.0)]
    assert find_front(points, is_higher_better=True) == {0, 2}
    assert find_front([(1.0, 3.0), (2.0, 2.0), (3.0, 2.5)], is_higher_better=False) == {0, 1}
    assert find_front([], is_higher_better=True) == set()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("- {device: a, since: 2026-01-01}", "0.usd_per_device_hour"),
        ("a: 1", "the file"),
        ("- {device: a, since: soon, usd_per_device_hour: 1}", "0.since"),
        ("[", "cannot be read"),
        ("- {device: a, since: 2026-01-01, usd_per_device_hour: -1}", "greater than or equal to 0"),
    ],
)
def test_a_table_with_a_fault_is_refused(tmp_path, text, word):
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_prices(path)
    assert word in str(caught.value)


def test_the_program_sums_a_sweep_and_marks_its_front(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = tmp_path / "runs"
    for name, seconds, top1 in (("a", 100.0, 50.0), ("b", 300.0, 70.0), ("c", 400.0, 60.0)):
        make(root, name, attempt(1, DAY, seconds), top1)
    path = tmp_path / "prices.yaml"
    path.write_text("- {device: 'TPU *', since: 2026-01-01, usd_per_device_hour: 4.5}\n")
    flags = ["cost", "--store", str(root), "--filter", "path", "--metric", "eval.top1"]
    assert main([*flags, "--prices", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["total"]["usd"] == pytest.approx(8 * 800 / 3600 * 4.5)
    assert {row["path"]: row["is_on_front"] for row in told["runs"]} == {
        "digits/a": True,
        "digits/b": True,
        "digits/c": False,
    }
    assert main(flags) == 0
    assert "no price" not in capsys.readouterr().out
    path.write_text("- {device: other, since: 2026-01-01, usd_per_device_hour: 4.5}\n")
    assert main([*flags, "--prices", str(path)]) == 0
    assert "no price for TPU v5 lite" in capsys.readouterr().out
    for bad in (
        ["cost"],
        ["cost", "a", "--filter", "path"],
        ["cost", "a", "--metric", "eval.x"],
        ["cost", "a", "--prices", "/nowhere"],
    ):
        assert main([*bad, "--store", str(root)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_costs_are_summed_by_group_and_divided_by_points_gained(tmp_path, monkeypatch, capsys):
    """Runs of model b cost 300 s more than those of model a, and are 10 points better."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = tmp_path / "runs"
    for model, seconds, top1 in (("a", 100.0, 50.0), ("b", 400.0, 60.0), ("c", 500.0, 45.0)):
        for seed in range(2):
            config = make_config(**{"model.name": model, "train.seed": seed})
            run = make_run(root, f"{model}{seed}", config=config, final={"eval_top1": top1 + seed})
            text = "".join(json.dumps(one) + "\n" for one in attempt(1, DAY, seconds))
            (run.path / "attempts.jsonl").write_text(text)
    path = tmp_path / "prices.yaml"
    path.write_text("- {device: 'TPU *', since: 2026-01-01, usd_per_device_hour: 4.5}\n")
    flags = ["cost", "--store", str(root), "--filter", "path", "--prices", str(path)]
    flags += ["--by", "model.name", "--metric", "eval.top1", "--base", "model.name=a"]
    assert main([*flags, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    rows = {row["name"].partition("=")[2]: row for row in told["groups"]}
    assert rows["b"]["runs"] == 2 and rows["b"]["usd"] == pytest.approx(8 * 800 / 3600 * 4.5)
    assert rows["b"]["usd_per_point"] == pytest.approx(8 * 300 / 3600 * 4.5 / 10)
    assert rows["b"]["hours_per_point"] == pytest.approx(8 * 300 / 3600 / 10)
    assert (rows["a"]["gain"], rows["c"]["gain"]) == (0.0, -5.0)
    assert rows["a"]["usd_per_point"] is None and rows["c"]["usd_per_point"] is None
    assert [name for name, row in rows.items() if row["is_on_front"]] == ["b", "a"]
    assert told["total"]["device_hours"] == pytest.approx(8 * 2000 / 3600)
    assert main(flags) == 0
    assert "0.30" in capsys.readouterr().out
    usual = ["cost", "--store", str(root), "a0", "b0", "--metric", "eval.top1"]
    assert main([*usual, "--base", "a0", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["runs"]
    assert told[1]["hours_per_point"] == pytest.approx(8 * 300 / 3600 / 10)
    assert told[1]["usd_per_point"] is None and told[1]["path"] == "digits/b0"
    faults = (
        (["--by", "model.nam"], "did you mean 'model.name'"),
        (["--by", ","], "names no key"),
        (["--base", "a7"], "is 0 of these rows"),
        (["--metric", "train.lr", "--base", "a0"], "a better direction"),
    )
    for bad, word in faults:
        assert main([*usual, *bad]) == 2
        error = capsys.readouterr().err
        assert word in error and error.count("\n") == 1


def test_an_unknown_cost_is_not_zero(tmp_path, capsys):
    make(tmp_path, "known", attempt(1, DAY, 360.0), top1=40.0)
    once = make(tmp_path, "once", [], top1=50.0)
    twice = make(tmp_path, "twice", [], top1=90.0)
    for record, facts in ((once, {"attempts": 1}), (twice, {"attempts": 2})):
        path = record.folder.path
        (path / "attempts.jsonl").unlink()
        told = {
            **json.loads((path / "run.json").read_text()),
            **facts,
            "started": DAY,
            "ended": DAY + 3600.0,
        }
        (path / "run.json").write_text(json.dumps(told))
    prices = tmp_path / "prices.yaml"
    prices.write_text("- {device: '*', since: 2026-01-01, usd_per_device_hour: 2.0}")
    ask = [
        "cost",
        f"--store={tmp_path}",
        "--filter=path",
        "--metric=eval.top1",
        f"--prices={prices}",
    ]
    assert main([*ask, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    rows = {one["name"].rpartition("/")[2]: one for one in answer["runs"]}
    assert rows["once"]["paid_s"] == 3600.0 and rows["once"]["usd"] == pytest.approx(2.0)
    lost = rows["twice"]
    assert (lost["paid_s"], lost["device_hours"], lost["usd"]) == (None, None, None)
    assert not lost["is_on_front"] and rows["once"]["is_on_front"] and rows["known"]["is_on_front"]
    assert answer["total"]["is_least"] and answer["total"]["unknown"] == ["digits/twice"]
    assert answer["total"]["paid_s"] == 3960.0
    assert main(ask) == 0
    text = capsys.readouterr().out
    assert "all together: at least 1.800 device-hours" in text and "digits/twice" in text
    assert main(["show", f"--store={tmp_path}", "twice"]) == 0
    assert "0.0 s" not in capsys.readouterr().out
