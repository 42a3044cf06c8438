"""Sweeps: trials are functions of the file, and grow with it."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from service.jobs.dispatcher import Dispatcher
from service.jobs.files import open_queue
from service.jobs.slots import parse_slots
from service.jobs.starters import ColdStarter, WarmStarter, create_starter
from service.sweeps.control import SweepControl
from service.sweeps.plan import (
    draw_point,
    find_differences,
    keep_sweep,
    make_trial,
    plan_trials,
    read_sweep,
    resolve_base,
)
from service.sweeps.report import TrialState, tabulate_sweep
from service.sweeps.spec import SweepSpec, read_spec
from service.sweeps.study import suggest_point
from store.compare.statistics import compute_interval
from tools import queue as queue_tool
from tools import sweep as sweep_tool
from utils.errors import UserError

CONFIG = "configs/regression/diabetes_linear.yaml"
GRID = {
    "config": CONFIG,
    "axes": {"optim.lr": [0.02, 0.002]},
    "seeds": [0, 1],
    "metric": "eval.mse",
}
QUICK = {"runtime.device": "cpu", "train.epochs": 1, "train.eval_every_epochs": 1}
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_spec(**values: object) -> Path:
        path = tmp_path / "tried.yaml"
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        return path

    return write_spec


def make_spec(**values: object) -> SweepSpec:
    return SweepSpec.model_validate({"name": "tried", **GRID, **values})


def test_a_grid_is_the_product_of_its_axes_and_seeds() -> None:
    spec = make_spec(axes={"optim.lr": [0.02, 0.002], "train.epochs": [1, 2, 3]})
    trials = plan_trials(spec)
    assert len(trials) == 12 and len({trial.id for trial in trials}) == 12
    assert trials[1].own == {"optim.lr": 0.02, "train.epochs": 1, "train.seed": 1}
    assert trials[0].run_id == f"tried-{trials[0].id}"


def test_a_trial_keeps_its_name_when_the_sweep_grows() -> None:
    before = {trial.id for trial in plan_trials(make_spec())}
    grown = make_spec(axes={"optim.lr": [0.05, 0.02, 0.002]}, seeds=[2, 0, 1])
    assert before < {trial.id for trial in plan_trials(grown)}
    turned = make_spec(axes=dict(reversed(GRID["axes"].items())), seeds=[1, 0])
    assert {trial.id for trial in plan_trials(turned)} == before


def test_random_draws_are_functions_of_seed_and_number() -> None:
    axes = {
        "optim.lr": {"low": 1e-4, "high": 1e-1, "log": True},
        "train.epochs": {"low": 1, "high": 3, "integer": True},
        "optim.name": ["sgd", "adamw"],
    }
    spec = make_spec(axes=axes, method="random", trials=300, seeds=[])
    points = [draw_point(spec, number) for number in range(300)]
    turned = make_spec(axes=dict(reversed(axes.items())), method="random", trials=9, seeds=[])
    assert [draw_point(turned, number) for number in range(9)] == points[:9]
    assert {point["train.epochs"] for point in points} == {1, 2, 3}
    assert {point["optim.name"] for point in points} == {"sgd", "adamw"}
    decades = [math.floor(math.log10(point["optim.lr"])) for point in points]
    assert all(1e-4 <= point["optim.lr"] <= 1e-1 for point in points)
    assert min(decades.count(decade) for decade in (-4, -3, -2)) > 70
    other = make_spec(axes=axes, method="random", trials=300, seeds=[], seed=1)
    assert draw_point(other, 0) != points[0]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"axis": {}}, "unknown key axis; did you mean 'axes'"),
        ({"config": None}, "config"),
        ({"axes": {"optim.lr": []}}, "axes.optim.lr"),
        ({"axes": {"optim.name": ["sgd", "sgd"]}}, "twice"),
        ({"axes": {"optim.lr": {"low": 1, "high": 2}}}, "is a range"),
        ({"axes": {"optim.lr": {"low": 2, "high": 1}}, "method": "random", "trials": 1}, "below"),
        ({"axes": {"optim.lr": {"low": 0, "high": 1, "log": True}}, "method": "random"}, "above 0"),
        ({"axes": {"optim.lr": {"lo": 0, "high": 1}}, "method": "random", "trials": 1}, "lo"),
        ({"method": "random"}, "trials is missing"),
        ({"trials": 3}, "trials has no effect"),
        ({"method": "bayes"}, "method"),
        ({"axes": {"train.seed": [1]}}, "what seeds is for"),
        ({"axes": {"run.run_id": ["a"]}}, "set by the sweep itself"),
        ({"set": {"optim.lr": 1}}, "is both in set and in axes"),
        ({"axes": {}, "seeds": []}, "both missing"),
        ({"axes": {"optim.lr": ["2e-2", 0.02]}}, "says 0.02 twice"),
        ({"axes": {"optim.lr": [1, 1.0]}}, "says 1.0 twice"),
        ({"method": "random", "trials": 3, "seeds": []}, "exceeds the 2 points"),
        ({"method": "seeds"}, "takes seeds and no axes"),
        ({"metric": "eval.top11"}, "no better direction"),
        ({"direction": "higher"}, "direction (higher) contradicts the catalogue of metrics"),
        ({"metric": "eval.top11", "direction": "up"}, "direction: input should be"),
        ({"seeds": list(range(5001))}, "more than 10,000"),
        ({"name": "../x"}, "name"),
        ({"seeds": "all"}, "seeds"),
    ],
)
def test_a_bad_spec_is_refused_in_a_line(
    write: Write, values: dict[str, object], words: str
) -> None:
    with pytest.raises(UserError) as told:
        read_spec(write(**{**GRID, **values}))
    assert words in str(told.value) and "\n" not in str(told.value)


def test_a_sweep_may_grow_and_not_change(tmp_path: Path) -> None:
    store, old = str(tmp_path / "runs"), make_spec()
    base = resolve_base(old)
    assert keep_sweep(store, old, base) is None
    more = make_spec(axes={"optim.lr": [0.02, 0.002, 0.1]}, seeds=[0, 1, 2], metric="eval.loss")
    assert keep_sweep(store, more, base) == old
    assert read_sweep(store, "tried") == more
    for values, words in [
        ({}, "axes.optim.lr lost 0.1; seeds was"),
        ({"axes": {"optim.lr": [0.02, 0.002, 0.1], "train.epochs": [1]}}, "axes was"),
        ({"set": {"train.epochs": 2}}, "set was"),
        ({"method": "random", "trials": 2}, 'method was "grid"'),
    ]:
        with pytest.raises(UserError, match="has begun with other values") as told:
            keep_sweep(store, make_spec(**values), base)
        assert words in str(told.value)
    changed = more.model_copy(update={"settings": {"train.epochs": 2}})
    with pytest.raises(UserError, match="epochs was 100 in the configuration, now 2"):
        keep_sweep(store, more, resolve_base(changed))
    with pytest.raises(UserError, match="did you mean 'tried'"):
        read_sweep(store, "tired")


def test_a_random_sweep_grows_by_trials_and_seeds_alone() -> None:
    old = make_spec(method="random", trials=3)
    assert find_differences(old, make_spec(method="random", trials=9, seeds=[0, 1, 2])) == []
    assert find_differences(old, make_spec(method="random", trials=2)) != []
    other = make_spec(method="random", trials=3, axes={"optim.lr": [0.02, 0.002, 0.1]})
    assert find_differences(old, other) != []
    alone = make_spec(method="random", trials=3, seeds=[])
    assert find_differences(alone, old) != []  # its trials would have other names


def test_the_table_groups_by_point_and_axis() -> None:
    spec = make_spec(axes={"optim.lr": [0.02, 0.002], "train.epochs": [1, 2]})
    values = dict(zip((trial.id for trial in plan_trials(spec)), range(8), strict=True))
    states = [
        TrialState(trial, "complete", float(values[trial.id]), "", "", "")
        for trial in plan_trials(spec)[:-1]
    ]
    states.append(TrialState(plan_trials(spec)[-1], "running", 7.0, "", "", ""))
    table = tabulate_sweep(spec, states)
    assert [row.interval.n for row in table.points] == [2, 2, 2, 1]
    assert [(row.trials, row.seeds) for row in table.points] == [(2, 2)] * 4
    assert [(row.trials, row.seeds) for row in table.axes["optim.lr"]] == [(4, 2)] * 2
    assert table.points[0].values == {"optim.lr": 0.02, "train.epochs": 1}  # the least error
    first = table.points[0].interval
    assert first == compute_interval([0.0, 1.0]) and first.mean == 0.5
    assert first.high == pytest.approx(0.5 + 12.7062 * 0.5, rel=1e-4)  # t of one degree
    by_rate = {row.values["optim.lr"]: row.interval for row in table.axes["optim.lr"]}
    # A seed counts by the mean of its trials, once they are all there.
    assert by_rate[0.02] == compute_interval([1.0, 2.0])
    assert (by_rate[0.002].mean, by_rate[0.002].n) == (5.0, 1)
    assert set(table.axes) == {"optim.lr", "train.epochs"}


def test_optuna_is_deterministic_and_learns_from_files_only() -> None:
    pytest.importorskip("optuna", reason="requirements-service.txt is not installed")
    axes = {"optim.lr": {"low": 1e-4, "high": 1.0, "log": True}, "optim.name": ["sgd", "adamw"]}
    spec = make_spec(method="optuna", trials=30, axes=axes, seeds=[])
    states: list[TrialState] = []
    for _ in range(30):
        point = suggest_point(spec, states)
        assert suggest_point(spec, states) == point
        value = (math.log10(point["optim.lr"]) + 2) ** 2 + (point["optim.name"] == "adamw")
        trial = plan_trials(make_spec(axes={key: [v] for key, v in point.items()}, seeds=[]))[0]
        states.append(TrialState(trial, "complete", value, "", "", ""))
    late = [one.value for one in states[-10:]]
    assert sum(late) / 10 < sum(one.value for one in states[:10]) / 10


def test_optuna_proposes_no_point_twice() -> None:
    pytest.importorskip("optuna", reason="requirements-service.txt is not installed")
    spec = make_spec(method="optuna", trials=3, seeds=[], axes={"optim.lr": [1.0, 2.0, 3.0]})
    states: list[TrialState] = []
    for _ in range(3):
        trial = make_trial(spec, suggest_point(spec, states), None)
        states.append(TrialState(trial, "complete", trial.point["optim.lr"], "", "", ""))
    assert {one.trial.point["optim.lr"] for one in states} == {1.0, 2.0, 3.0}
    assert suggest_point(spec, states) is None


def test_a_sweep_beside_another_dispatcher_watches_and_then_replaces_it(tmp_path: Path) -> None:
    queue = open_queue(str(tmp_path / "runs"))
    control = SweepControl(queue, make_spec(), "me", tell=lambda one: None)
    control.begin()
    control.stop()
    with Dispatcher(queue, parse_slots("1")) as other:
        watching = ThreadPoolExecutor(1).submit(control.run, parse_slots("1"))
        time.sleep(0.5)
        assert not watching.done()
        other.tick()
    assert {one.state for one in watching.result(60)} == {"stopped"}


def test_another_spec_is_refused_in_every_results_view(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = str(tmp_path / "runs")
    spec = str(write(**GRID))
    SweepControl(open_queue(store), read_spec(Path(spec)), "me", tell=lambda one: None).begin()
    write(**{**GRID, "set": {"train.epochs": 50}})
    for words in (["status"], ["plan"], ["run", "--on", "slurm", "--dry-run"]):
        assert sweep_tool.main([words[0], spec, "--store", store, *words[1:]]) == 2
        assert "set was {}" in capsys.readouterr().err


def test_a_sweep_runs_and_continues_with_one_more_seed(
    write: Write,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A real run that is forked, then a cold one of one more seed; the first stays as it is."""
    made: list[ColdStarter] = []

    def note(*, is_warm: bool) -> ColdStarter:
        made.append(create_starter(is_warm=is_warm))
        return made[-1]

    monkeypatch.setattr(sweep_tool, "create_starter", note)
    store = str(tmp_path / "runs")
    given = {"config": CONFIG, "set": QUICK, "seeds": [0], "metric": "eval.mse", "method": "seeds"}
    spec = str(write(**given))
    flags = ["--store", store, "--slots", "2"]
    assert sweep_tool.main(["resume", spec, *flags]) == 2
    assert "is not in" in capsys.readouterr().err
    assert sweep_tool.main(["run", spec, *flags]) == 0
    assert "1 of 1 trials are complete" in capsys.readouterr().out
    ended = {path: path.stat().st_mtime_ns for path in Path(store).glob("*/*/run.json")}
    write(**{**given, "seeds": [0, 5]})
    assert sweep_tool.main(["resume", spec, *flags, "--cold"]) == 0
    assert list(map(type, made)) == [WarmStarter, ColdStarter]
    capsys.readouterr()
    assert sweep_tool.main(["status", spec, "--store", store, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [trial["state"] for trial in told["trials"]] == ["complete"] * 2
    assert told["table"]["points"][0]["interval"]["n"] == 2
    assert ended == {path: path.stat().st_mtime_ns for path in ended}
    write(**{**given, "seeds": [5]})
    assert sweep_tool.main(["run", spec, *flags]) == 2
    assert "has begun with other values" in capsys.readouterr().err


def test_an_invalid_trial_stops_the_sweep_before_it_starts(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = write(**{**GRID, "axes": {"data.global_batch_size": [64, 4096]}})
    assert sweep_tool.main(["run", str(spec), "--store", str(tmp_path / "runs")]) == 2
    told = capsys.readouterr().err
    assert "trial 3 of 4 (data.global_batch_size=4096 train.seed=0)" in told
    assert not (tmp_path / "runs").exists()


def test_the_queue_tool_submits_and_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = ["--store", str(tmp_path / "runs")]
    for absent in (["list"], ["run", "--until-empty"], ["log", "a"]):
        assert queue_tool.main([*absent, *store]) == 2
        assert "is no directory" in capsys.readouterr().err and not (tmp_path / "runs").exists()
    words = [CONFIG, "optim.lr=1e-3", "run.run_id=a", "runtime.device=cpu"]
    assert queue_tool.main(["submit", *words, *store, "--json"]) == 0
    job = json.loads(capsys.readouterr().out)
    assert job["run"] == "diabetes_linear/a" and job["state"] == "queued"
    for bad, said in [
        (["submit", CONFIG, "optim.lr"], "no KEY=VALUE"),
        (["submit", CONFIG, "optim.lr=1", "optim.lr=2"], "given twice"),
        (["submit", CONFIG, "optim.lrr=1"], "did you mean"),
        (["submit", "configs/nothing.yaml"], "configs/nothing.yaml"),
        (["submit", *words, "--job-slots", "0"], "--job-slots"),
        (["stop", "b"], "is not in"),
        (["run", "--slots", "x"], "--slots"),
    ]:
        assert queue_tool.main([*bad, *store]) == 2, bad
        told = capsys.readouterr().err
        assert said in told and told.count("\n") == 1
    assert queue_tool.main(["stop", job["id"], *store]) == 0
    assert queue_tool.main(["run", "--until-empty", *store]) == 0
    capsys.readouterr()
    assert queue_tool.main(["list", *store]) == 0
    assert "stopped" in capsys.readouterr().out


def test_a_sweep_is_watched_without_dispatching(tmp_path: Path) -> None:
    queue = open_queue(str(tmp_path / "runs"))
    told: list[TrialState] = []
    control = SweepControl(queue, make_spec(), "me", tell=told.append)
    control.begin()
    assert not control.look() and [one.state for one in told] == ["queued"] * 4
    control.stop()
    assert {job.state for job in queue.list()} == {"stopping"}
    assert {one.state for one in control.run(parse_slots("1"))} == {"stopped"}
    assert [one.state for one in told].count("stopped") == 4


def test_the_documented_sweep_equals_the_file() -> None:
    text = Path("docs/sweeps.md").read_text(encoding="utf-8")
    shown = text.split("```yaml\n# docs/depth.yaml\n")[1].split("```")[0]
    spec = read_spec(Path("docs/depth.yaml"))
    assert yaml.safe_load(shown) == yaml.safe_load(Path("docs/depth.yaml").read_text())
    assert len(plan_trials(spec)) == 12 and resolve_base(spec).train.epochs == 5
    commands = ("plan", "run", "status", "resume")
    pairs = itertools.pairwise(text.split())
    named = [after for word, after in pairs if word in commands and after.endswith(".yaml")]
    assert named and all(Path(path).is_file() for path in named)
