"""Differences over seeds with honest intervals; where runs diverge; which settings differ."""

from __future__ import annotations

import itertools
import json
import math
import random
import struct
from pathlib import Path

import fsspec
import numpy as np
import pytest
from safetensors.numpy import save, save_file
from scipy import stats

from store.compare.differences import find_differences, find_environment
from store.compare.divergence import (
    count_ulps,
    count_ulps32,
    find_checkpoint,
    find_divergence,
    read_lines,
)
from store.compare.report import view_divergence
from store.compare.sides import TOO_SMALL, Side, compare_sides, group_records, list_metrics
from store.compare.statistics import adjust, compute_delta, compute_joint_delta, summarise
from store.compare.tensors import find_tensors
from store.query.record import RunRecord
from store.record.history import write_lines
from tests.support.stored_runs import make_config, make_lines, make_run
from utils.errors import UserError
from utils.storage.folder import COMMIT_FILE
from utils.storage.places import open_folder


@pytest.mark.parametrize(("n", "is_paired"), itertools.product((3, 5, 10), (True, False)))
def test_intervals_have_their_nominal_coverage(n, is_paired):
    """2,000 simulated comparisons each: the 95 % interval covers in 93 to 97 % of them."""
    draw = np.random.default_rng([16, n, is_paired])
    truth, covered = 0.7, 0
    for _ in range(2000):
        seeds = draw.normal(0, 2.0, n) if is_paired else np.zeros(n)
        base, new = draw.normal(80, 1.0, n) + seeds, draw.normal(80 + truth, 1.0, n) + seeds
        keys = range(n) if is_paired else range(n, 2 * n)
        delta = compute_delta(dict(enumerate(base)), dict(zip(keys, new, strict=True)))
        assert delta.method == ("paired" if is_paired else "Welch")
        covered += delta.low <= truth <= delta.high
    assert 0.93 <= covered / 2000 <= 0.97


def test_p_values_and_intervals_equal_scipys():
    draw = random.Random(3)
    for n, m in ((2, 2), (3, 7), (10, 4)):
        base = {("a", i): draw.gauss(1, 2) for i in range(n)}
        new = {("b", i): draw.gauss(2, 1) for i in range(m)}
        told = stats.ttest_ind(list(new.values()), list(base.values()), equal_var=False)
        found = compute_delta(base, new)
        interval = told.confidence_interval(0.95)
        assert (found.p, found.low, found.high) == pytest.approx(
            (told.pvalue, interval.low, interval.high), rel=1e-9
        )
    base = {i: draw.gauss(1, 2) for i in range(5)}
    new = {i: draw.gauss(1, 2) for i in reversed(range(5))}
    told = stats.ttest_rel([new[i] for i in base], list(base.values()))
    assert compute_delta(base, new).p == pytest.approx(told.pvalue, rel=1e-9)


def test_joint_deltas_of_groups_equal_welchs_test():
    draw = random.Random(5)
    pairs = [
        ({i: draw.gauss(80, 1) for i in range(n)}, {i: draw.gauss(82, sd) for i in range(n)})
        for n, sd in ((5, 1.0), (4, 6.0))
    ]
    # The difference of two means has the error of their sum: Welch's test with a sign turned.
    gaps = [[new[i] - base[i] for i in base] for base, new in pairs]
    told = stats.ttest_ind(gaps[0], [-gap for gap in gaps[1]], equal_var=False)
    found, interval = compute_joint_delta(pairs), told.confidence_interval(0.95)
    assert (found.p, 2 * found.low, 2 * found.high) == pytest.approx(
        (told.pvalue, interval.low, interval.high), rel=1e-9
    )
    assert (found.pairs, found.least_p) == (9, 2**-8)
    one = compute_joint_delta(pairs[:1])
    assert one.p == pytest.approx(compute_delta(*pairs[0]).p)
    assert compute_joint_delta([pairs[0], ({0: 1.0}, {0: 2.0})]) is None


def test_joint_intervals_have_their_nominal_coverage():
    """Two sets of five pairs, of very different variances, 2,000 times."""
    draw, covered = np.random.default_rng(17), 0
    for _ in range(2000):
        pairs = []
        for truth, sd in ((1.0, 0.5), (2.0, 3.0)):
            seeds = draw.normal(0, 2.0, 5)
            base, new = draw.normal(80, sd, 5) + seeds, draw.normal(80 + truth, sd, 5) + seeds
            pairs.append((dict(enumerate(base)), dict(enumerate(new))))
        delta = compute_joint_delta(pairs)
        covered += delta.low <= 1.5 <= delta.high
    assert 0.93 <= covered / 2000 <= 0.97


def test_small_samples_are_marked_as_inconclusive():
    three = compute_delta({0: 1.0, 1: 1.1, 2: 0.9}, {0: 9.0, 1: 9.1, 2: 8.95})
    assert three.p < 0.001 and three.least_p == 0.25 and not three.can_tell
    six = compute_delta({i: i / 10 for i in range(6)}, {i: 3 + i / 11 for i in range(6)})
    assert six.least_p == 2**-5 and six.can_tell
    one = compute_delta({0: 1.0}, {0: 2.0})
    assert (one.value, one.low, one.p, one.method) == (1.0, None, None, "single")
    same = compute_delta(dict.fromkeys(range(6), 1.0), dict.fromkeys(range(6), 1.0))
    assert (same.low, same.high, same.p) == (0.0, 0.0, 1.0)
    assert summarise([2.0]).sd is None


def test_holm_corrects_for_multiple_comparisons():
    assert adjust([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert adjust([0.9, 0.8]) == [1.0, 1.0] and adjust([]) == []


def make_side(root: Path, name: str, shift: float, seeds: range, **changes: object) -> Side:
    """Runs of one configuration; a shift makes top1 higher and the loss lower."""
    draw = random.Random(name)
    runs = []
    for seed in seeds:
        final = {
            "eval_top1": 80 + shift + draw.gauss(0, 0.2),
            "eval_examples": 96.0,
            "eval_loss": 1 - shift / 10 + draw.gauss(0, 0.02),
            "custom": 1.0,
        }
        config = make_config(**{"train.seed": seed, **changes})
        runs.append(make_run(root, f"{name}{seed}", config=config, final=final))
    return Side(name, tuple(RunRecord(run.path) for run in runs))


def test_each_metric_is_compared_in_its_own_direction(tmp_path):
    base = make_side(tmp_path, "base", 0.0, range(8))
    new = make_side(tmp_path, "new", 1.0, range(8))
    metrics = list_metrics([base, new])
    assert metrics == ["eval.loss", "eval.top1"]  # counts and numbers of nobody's have no verdict
    found = {one.metric: one for one in compare_sides(base, new, metrics)}
    assert {one.verdict for one in found.values()} == {"better"}
    assert found["eval.loss"].delta.value < 0 < found["eval.top1"].delta.value
    assert found["eval.top1"].p >= found["eval.top1"].delta.p
    assert {one.verdict for one in compare_sides(new, base, metrics)} == {"worse"}
    few = [Side(one.name, one.records[:3]) for one in (base, new)]
    assert {one.verdict for one in compare_sides(*few, metrics)} == {TOO_SMALL}
    (custom, lost) = compare_sides(base, new, ["custom", "eval.nothing"])
    assert (custom.verdict, lost.verdict, len(lost.bad)) == ("equal", "missing", 16)


def test_a_non_finite_number_is_reported_and_not_averaged(tmp_path):
    base, new = (make_side(tmp_path, name, 0.0, range(3)) for name in ("base", "new"))
    make_run(tmp_path, "new9", final={"eval_top1": math.nan, "eval_loss": math.inf})
    new = Side("new", (*new.records, RunRecord(tmp_path / "digits" / "new9")))
    for one in compare_sides(base, new, ["eval.top1", "eval.loss"]):
        assert one.bad == ("digits/new9",) and one.new.n == 3
        assert math.isfinite(one.new.mean)


def test_repeated_runs_of_a_seed_count_once(tmp_path):
    """Three equal runs of one seed would otherwise have no spread, and make p small."""
    base = make_side(tmp_path, "base", 0.0, range(4))
    copies = [
        make_run(tmp_path, f"copy{n}", final={"eval_top1": value})
        for n, value in enumerate((85.0, 85.0, 85.0, 85.0))
    ]
    new = Side("new", tuple(RunRecord(run.path) for run in copies))
    assert (base.seeds, new.seeds) == (4, 1)
    (found,) = compare_sides(base, new, ["eval.top1"])
    assert (found.new.mean, found.new.sd, found.new.n, found.new.runs) == (85.0, None, 1, 4)
    assert (found.delta.method, found.p, found.verdict) == ("single", None, TOO_SMALL)
    # A seed that stands twice weighs as much as the others, and still pairs.
    twice = Side("twice", (*base.records, make_side(tmp_path, "more", 8.0, range(1)).records[0]))
    (found,) = compare_sides(base, twice, ["eval.top1"])
    assert (found.new.n, found.new.runs, found.delta.pairs) == (4, 5, 4)
    values = [one.values["eval.top1"] for one in twice.records]
    assert found.delta.value == pytest.approx((values[4] - values[0]) / 8)


def test_runs_are_grouped_by_configuration_without_the_seed(tmp_path):
    make_side(tmp_path, "a", 0.0, range(2))
    make_side(tmp_path, "b", 0.0, range(2), **{"optim.lr": 0.5, "data.root": "elsewhere"})
    make_side(tmp_path, "c", 0.0, range(2, 3), **{"data.root": "elsewhere"})
    records = [RunRecord(path) for path in sorted((tmp_path / "digits").iterdir())]
    free = {"data.root", "run.run_id", "run.output_dir"}
    sides = group_records(records, free)
    assert [[one.path for one in side.records] for side in sides] == [
        ["digits/a0", "digits/a1", "digits/c2"],
        ["digits/b0", "digits/b1"],
    ]
    found = find_differences([sides[0], sides[1]], free)
    assert [(one.key, one.matters) for one in found] == [
        ("optim.lr", True),
        ("train.seed", True),
        ("data.root", False),
    ]
    assert found[0].values == ("0.001", "0.5") and found[2].values == (
        "data, elsewhere",
        "elsewhere",
    )
    pairs = [Side("a", sides[0].records[:2]), sides[1]]
    assert "train.seed" not in [one.key for one in find_differences(pairs, free)]


def test_environment_differences_list_the_commit_first(tmp_path):
    runs = [make_run(tmp_path, name, final={"eval_top1": 1.0}) for name in "ab"]
    environment = {"git_commit": "def-dirty", "host": "vm", "packages": {"torch": "3", "timm": "1"}}
    runs[1].update(environment=environment)
    sides = [Side(run.path.name, (RunRecord(run.path),)) for run in runs]
    found = find_environment(sides)
    assert [one.key for one in found] == ["git_commit", "device", "packages.timm", "packages.torch"]
    assert found[0].values == ("abc", "def-dirty") and found[1].values == ("cpu", "(not there)")


def nudge(value: float, steps: int) -> float:
    """A number of single precision so many ulps away."""
    bits = struct.unpack("i", struct.pack("f", value))[0]
    return struct.unpack("f", struct.pack("i", bits + steps))[0]


def test_planted_ulp_differences_are_found_at_their_step():
    draw = random.Random(7)
    names = ("loss/total", "grad_norm", "lr")
    lines = [
        {**line, **{n: nudge(float(np.float32(line[n])), 0) for n in names if n in line}}
        for line in make_lines(50)
    ]
    for _ in range(100):
        place, name = draw.randrange(50), draw.choice(names)
        changed = json.loads(json.dumps(lines))
        for later in range(place, 50):
            changed[later]["lr"] = (
                nudge(changed[later]["lr"], 3) if later > place else lines[later]["lr"]
            )
            changed[later]["time_s"] += 1.0  # a clock
        changed[place][name] = nudge(changed[place][name], draw.choice((-1, 1)))
        found = find_divergence(lines, changed)
        assert (found.step, found.kind, found.metric, found.ulps32) == (place + 1, "train", name, 1)
        assert found.lines == place and found.ulps == 2**29


def test_runs_that_differ_only_in_clocks_are_equal():
    draw = random.Random(8)
    for _ in range(20):
        lines = make_lines(30)
        clocks = {"attempt": 2, "time_s": draw.random(), "img_per_s": draw.random(), "graphs": 9}
        other = [{**line, **clocks} for line in lines]
        assert find_divergence(lines, other) is None
    assert find_divergence([], []) is None


def test_missing_lines_signs_and_words_are_differences():
    lines = make_lines(3)
    short = find_divergence(lines, lines[:-1])
    assert (short.step, short.kind, short.metric, short.lines) == (3, "eval", "", 3)
    zero = [{"step": 1, "kind": "train", "a": 0.0}], [{"step": 1, "kind": "train", "a": -0.0}]
    assert find_divergence(*zero).metric == "a" and find_divergence(*zero).ulps == 0
    nan = {"step": 1, "kind": "train", "a": None, "nonfinite": {"a": "nan"}}
    inf = {**nan, "nonfinite": {"a": "inf"}}
    assert find_divergence([nan], [inf]).metric == "nonfinite"
    assert find_divergence([nan], [nan]) is None
    extra = find_divergence([lines[0]], [{**lines[0], "b": 1.0}])
    assert (extra.metric, extra.base, extra.ulps) == ("b", None, None)


def test_ulps_count_the_representable_numbers_between():
    assert count_ulps(1.0, math.nextafter(1.0, 2)) == 1 and count_ulps(-0.0, 0.0) == 0
    assert count_ulps(-5e-324, 5e-324) == 2 and count_ulps(1.0, None) is None
    assert count_ulps(1.0, True) is None and count_ulps(1.0, math.nan) is None
    assert count_ulps32(1.0, 1 + 2**-23) == 1 and count_ulps32(1.0, 1 + 2**-24) is None
    assert count_ulps32(1e300, 1.0) is None


def test_the_last_common_checkpoint_and_its_tensors_are_compared(tmp_path):
    runs = [make_run(tmp_path, name, lines=make_lines(9)) for name in "ab"]
    for run, steps in zip(runs, ((2, 4, 8), (4, 6, 8)), strict=True):
        for step in steps:
            folder = run.path / "checkpoints" / f"step_{step:08d}"
            folder.mkdir(parents=True)
            weight = np.arange(6, dtype=np.float32)
            weight[3] = 7.0 if run is runs[1] and step == 8 else 3.0
            save_file({"w": weight, "b": np.zeros(2, np.float32)}, folder / "model.safetensors")
    records = [RunRecord(run.path) for run in runs]
    assert [find_checkpoint(records, step) for step in (9, 8, 4)] == [8, 4, None]
    for step, expected in ((8, ["model.safetensors:w"]), (4, [])):
        folders = [run.path / "checkpoints" / f"step_{step:08d}" for run in runs]
        assert find_tensors(*folders) == expected
    (runs[0].path / "checkpoints" / "step_00000004" / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match="no whole safetensors"):
        find_tensors(*folders)


def test_checkpoints_on_buckets_and_below_another_root_are_compared(tmp_path):
    """A run on a bucket, and one whose checkpoints lie below `run.checkpoint_root`."""
    memory = fsspec.filesystem("memory")
    places = ["memory://compared/runs/digits/a/checkpoints", "memory://compared/root/digits/b"]
    config = make_config(**{"run.checkpoint_root": "memory://compared/root"})
    runs = [
        make_run(tmp_path, "a", lines=make_lines(9)),
        make_run(tmp_path, "b", lines=make_lines(9, start=2.5), config=config),
    ]
    memory.put(str(runs[0].path), "/compared/runs/digits/a", recursive=True)
    for number, place in enumerate(places):
        for step in (4, 6, 8):
            folder = open_folder(place).child(f"step_{step:08d}")
            tensors = {
                "w": np.full(6, step + (number if step == 6 else 0), np.float32),
                "b": np.zeros(2, np.float32),
            }
            memory.pipe(f"{folder.place.removeprefix('memory:/')}/model.safetensors", save(tensors))
            if step != 8:  # of this one the upload was cut
                folder.write_text(COMMIT_FILE, "{}")
    records = [RunRecord("memory://compared/runs/digits/a"), RunRecord(runs[1].path)]
    assert [find_checkpoint(records, step) for step in (9, 6, 4)] == [6, 4, None]
    folders = [record.checkpoints.child("step_00000006") for record in records]
    assert find_tensors(*folders) == ["model.safetensors:w"]
    assert find_tensors(*(record.checkpoints.child("step_00000004") for record in records)) == []
    memory.pipe("/compared/root/digits/b/step_00000004/model.safetensors", b"torn")
    with pytest.raises(UserError, match="no whole safetensors"):
        find_tensors(*(record.checkpoints.child("step_00000004") for record in records))
    sides = [Side("a", [records[0]]), Side("b", [records[1]])]
    told = view_divergence(sides, with_tensors=False)
    assert (told["found"]["step"], told["checkpoint"], told["tensors"]) == (1, None, None)
    write_lines(runs[1].path, [*make_lines(6)[:-1], {**make_lines(7)[-2], "loss/total": 0.5}])
    told = view_divergence([sides[0], Side("b", [RunRecord(runs[1].path)])], with_tensors=True)
    assert (told["found"]["step"], told["checkpoint"]) == (7, 6)
    assert told["tensors"] == ["model.safetensors:w"]
    memory.rm("/compared", recursive=True)


def test_a_long_history_is_read_line_by_line(tmp_path):
    run = make_run(tmp_path, "a", lines=make_lines(20))
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('\x00\n[1]\n{"step": "x"}\n{"step": 99, "ki')
    record = RunRecord(run.path)
    assert list(read_lines(record)) == record.lines == make_lines(20)
