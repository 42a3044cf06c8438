"""The table of methods: what is trained, which weight is chosen, which claims are allowed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scipy import stats

from losses.table import LOSSES
from proofs.kd_table import __main__ as program
from proofs.kd_table.entries import ENTRIES, SETS, UNSERVED
from proofs.kd_table.phases import (
    Budget,
    find_teacher,
    make_row_spec,
    make_search_spec,
    make_teacher_spec,
)
from proofs.kd_table.report import Account, SetTable, describe_report, draw_report, format_report
from proofs.kd_table.results import (
    TableRow,
    choose_weight,
    compare_rows,
    compare_seeds,
    compare_sets,
    find_further,
    join_sets,
    make_row,
)
from service.jobs.files import open_queue
from service.sweeps.plan import Trial, plan_trials, resolve_base
from service.sweeps.report import TrialState
from store.compare.statistics import compute_interval
from utils.config.load import combine_config

ROOT = Path(__file__).resolve().parents[2]
KD = next(entry for entry in ENTRIES if entry.name == "kd")


def make_budget(place: Path) -> Budget:
    return Budget(place / "data", place / "runs", (0, 1), (100,), (0.1, 1.0), 3, 3)


def make_state(point: dict, seed: int, value: float | None, state: str = "complete") -> TrialState:
    return TrialState(Trial("a", "sweep", point, seed), state, value, "job", "run", "out of luck")


def make_tried(multiple: float, seed: int, value: float | None, state: str = "complete"):
    weight = KD.term["weight"] * multiple
    return make_state({"distill.losses": [{**KD.term, "weight": weight}]}, seed, value, state)


def make_scored(name: str, *scores: float) -> TableRow:
    return TableRow(name, None, dict(enumerate(scores)), compute_interval(scores))


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_method_has_a_complete_configuration_on_every_set(name, entry, tmp_path):
    budget, table_set = make_budget(tmp_path), SETS[name]
    search = make_search_spec(entry, table_set, budget)
    row = make_row_spec(entry, table_set, budget, 0.1)
    assert search.seeds == [100] and row.seeds == [0, 1]
    for spec, weights in ((search, (0.1, 1.0)), (row, (0.1,))):
        trials = plan_trials(spec)
        assert len(trials) == len(weights) * len(spec.seeds)
        config = combine_config(spec.config, {**spec.settings, **trials[0].own}, "test")
        assert config.distill.losses[0].weight == pytest.approx(entry.term["weight"] * weights[0])
        assert config.distill.alpha == 0.5 and config.data.name == name
        # The search must not see what the table shows.
        assert (config.data.test_split == "test") == (spec is row)
    resolve_base(search)  # a sweep is whole without its axes, too


def test_rows_and_reasons_name_registered_losses():
    aliases = {"soft", "hard_kd", "mlkd_total", "lskd_kd"}  # other names of rows that are there
    rows = {entry.term["name"] for entry in ENTRIES}
    assert not rows & UNSERVED.keys()
    assert rows | UNSERVED.keys() | aliases <= set(LOSSES.names())
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)


@pytest.mark.parametrize(
    ("method", "key", "counts"),
    [("crd", "num_examples", (1197, 2976)), ("nd", "num_classes", (10, 62))],
)
def test_a_loss_gets_the_counts_of_its_set(method, key, counts, tmp_path):
    entry = next(entry for entry in ENTRIES if entry.name == method)
    for name, count in zip(("digits", "fonts"), counts, strict=True):
        spec = make_row_spec(entry, SETS[name], make_budget(tmp_path), 1.0)
        assert spec.axes["distill.losses"][0][0]["args"][key] == count


def test_a_set_lists_the_methods_that_cannot_teach_its_student(tmp_path):
    names = {entry.name for entry in ENTRIES}
    assert all(names >= one.unserved.keys() for one in SETS.values())
    options = program.main.parse(["--output-dir", str(tmp_path)])
    row = make_scored("kd", 1.0, 2.0)
    tables = {name: SetTable((97.0, 96.0), make_scored("alone", 1.0, 2.0), (row,)) for name in SETS}
    missing = program.make_account(options, tables).missing
    assert "kd" not in missing and missing["dkd"] == "on digits: not run; on fonts: not run"
    assert missing["vitkd"].startswith("on digits: needs the teacher's grid of patches")
    assert missing["fsp"] == UNSERVED["fsp"]


def test_a_method_with_two_views_uses_the_sets_second_view(tmp_path):
    crld = next(entry for entry in ENTRIES if entry.name == "crld")
    for name, size in (("digits", 8), ("fonts", 16)):
        axes = make_row_spec(crld, SETS[name], make_budget(tmp_path), 1.0).axes
        assert axes["distill.views"] == ["weak_strong"]
        assert f"inception_crop({size}, area_min=50)" in axes["data.strong_pp"][0]
    assert (
        "data.strong_pp" not in make_row_spec(KD, SETS["digits"], make_budget(tmp_path), 1.0).axes
    )


def test_students_learn_from_teachers_of_the_tables_own_sweep(tmp_path):
    budget, digits = make_budget(tmp_path), SETS["digits"]
    trials = plan_trials(make_teacher_spec(digits, budget))
    places = [budget.output_dir / "digits_teacher" / one.run_id for one in trials]
    assert [find_teacher(digits, budget, seed) for seed in (0, 1)] == places
    two = next(entry for entry in ENTRIES if entry.teachers == 2)
    axes = make_row_spec(two, digits, budget, 1.0).axes
    assert [one["weights"] for one in axes["distill.teachers"][0]] == list(map(str, places))


def test_the_smallest_weight_of_the_best_on_validation_is_chosen():
    scores = {0.01: (70, 72), 0.1: (90, 88), 1.0: (89, 89), 10.0: (10, 99)}
    states = [make_tried(m, s, v) for m, pair in scores.items() for s, v in enumerate(pair)]
    choice = choose_weight(KD, states)
    assert (choice.multiple, choice.weight, choice.is_edge) == (0.1, 0.1 * KD.term["weight"], False)
    assert choice.validation == {0.01: 71, 0.1: 89, 1.0: 89, 10.0: 54.5}
    assert choose_weight(KD, states[:2] + states[4:6]).is_edge


def test_a_weight_with_missing_seeds_is_not_chosen():
    states = [
        make_tried(0.1, 0, 80.0),
        make_tried(0.1, 1, 80.0),
        make_tried(1.0, 0, 99.0),
        make_tried(1.0, 1, None, "failed"),
    ]
    assert choose_weight(KD, states).multiple == 0.1
    assert choose_weight(KD, [make_tried(1.0, 0, float("nan"))]) is None


def test_the_search_goes_beyond_a_best_weight_at_its_edge():
    def find(**scores: float | None) -> float | None:
        states = [
            make_tried(float(multiple[1:]), 0, value, "complete" if value else "failed")
            for multiple, value in scores.items()
        ]
        return find_further(KD, states)

    assert find(x1=70.0, x2=80.0, x8=90.0) == 32.0
    assert find(x1=90.0, x2=80.0, x8=70.0) == 0.5
    assert find(x1=70.0, x2=90.0, x8=80.0) is None
    assert find(x1=70.0, x2=80.0, x8=90.0, x32=None) is None  # was tried, and is no number
    assert find(x1=None, x2=80.0, x8=90.0) == 32.0
    assert find(x8=90.0) is None


def test_a_further_weight_is_its_own_sweep(tmp_path):
    budget = make_budget(tmp_path)
    spec = make_search_spec(KD, SETS["digits"], budget, 100.0)
    (trial,) = plan_trials(spec)
    assert spec.name == "digits-kd-search-x100" and spec.seeds == [100]
    assert trial.point["distill.losses"][0]["weight"] == 100.0 * KD.term["weight"]
    assert spec.settings["data.test_split"] == ""


def test_joined_sets_sum_gains_and_variances():
    alone = [make_scored("alone", 80.0, 81.0, 79.0), make_scored("alone", 20.0, 22.0, 24.0)]
    kd = [make_scored("kd", 82.0, 82.5, 81.5), make_scored("kd", 25.0, 26.0, 28.5)]
    hard = [make_scored("hard", 80.5, 80.0, 80.0), make_scored("hard", 19.0, 22.5, 25.0)]
    only = make_scored("at", 1.0, 2.0, 3.0)
    rows = join_sets(alone, [[kd[0], hard[0], only], [hard[1], kd[1]]])
    assert [row.name for row in rows] == ["kd", "hard"]
    tables = [
        compare_rows(*pair)
        for pair in zip(alone, ([kd[0], hard[0]], hard[1:] + kd[1:]), strict=True)
    ]
    means = [row.gain.value for table in tables for row in table if row.name == "kd"]
    assert rows[0].gain.value == pytest.approx(sum(means) / 2)
    gaps = [[2.0, 1.5, 2.5], [-5.0, -4.0, -4.5]]
    p = float(stats.ttest_ind(*gaps, equal_var=False).pvalue)
    assert rows[0].p_alone == pytest.approx(2 * p) and rows[0].p_base is None
    assert rows[0].p_alone < min(row.p_alone for table in tables for row in table)
    assert join_sets(alone[:1], [kd[:1]]) == [] == join_sets(alone, [kd[:1], hard[:1]])


def test_a_failed_run_is_reported_and_not_counted():
    row = make_row("kd", None, [make_state({}, 0, 90.0), make_state({}, 1, None, "failed")])
    assert row.scores == {0: 90.0} and row.failures == ("out of luck",)
    assert make_row("kd", None, [make_state({}, 0, None, "failed")]).interval is None


def test_p_values_are_pairwise_and_corrected_by_holm():
    alone = make_scored("alone", 90.0, 91.0, 89.0, 90.5, 90.0)
    kd = make_scored("kd", 92.0, 92.5, 91.5, 92.0, 92.4)
    dkd = make_scored("dkd", 90.5, 90.0, 90.0, 90.4, 90.9)
    worse = make_scored("hard", 88.0, 89.5, 88.5, 87.0, 89.0)
    rows = {row.name: row for row in compare_rows(alone, [dkd, kd, worse])}
    assert list(rows) == ["kd", "dkd", "hard"]  # by their means

    def compute(one: TableRow, other: TableRow) -> float:
        return float(stats.ttest_rel(list(one.scores.values()), list(other.scores.values())).pvalue)

    raw = {row.name: compute(row, alone) for row in (kd, dkd, worse)}
    first, second, third = sorted(raw, key=raw.get)
    assert rows[first].p_alone == pytest.approx(3 * raw[first])
    assert rows[second].p_alone == pytest.approx(max(3 * raw[first], 2 * raw[second]))
    assert rows[third].p_alone == pytest.approx(max(rows[second].p_alone, raw[third]))
    assert rows["kd"].p_base is None
    least = min(compute(dkd, kd), compute(worse, kd))
    assert min(rows["dkd"].p_base, rows["hard"].p_base) == pytest.approx(2 * least)
    assert rows["kd"].gain.value == pytest.approx(1.98)


def test_equal_orders_have_tau_one_and_reversed_ones_minus_one():
    same = [make_scored("a", 1, 2), make_scored("b", 3, 4), make_scored("c", 5, 6)]
    turned = [make_scored("a", 1, 6), make_scored("b", 3, 4), make_scored("c", 5, 2)]
    assert compare_seeds(same).mean == 1.0
    assert compare_seeds(turned).mean == -1.0
    falling = [make_scored("a", 9, 9), make_scored("b", 8, 8), make_scored("c", 7, 7)]
    found = compare_sets({"digits": same, "fonts": falling})
    assert (found.mean, found.pairs, found.methods) == (-1.0, 1, 3)
    mixed = [make_scored("a", 1), make_scored("b", 5), make_scored("c", 3)]  # 2 of 3 pairs agree
    assert compare_sets({"digits": same, "fonts": mixed}).mean == pytest.approx(1 / 3)
    assert compare_sets({"digits": same}) is None
    assert compare_seeds([make_scored("a", 1, 2)]) is None


def test_a_report_is_written_as_markdown_json_and_picture(tmp_path):
    alone = make_scored("alone", 80.0, 82.0)
    choice = choose_weight(KD, [make_tried(0.1, 100, 85.0), make_tried(1.0, 100, 84.0)])
    kd = TableRow("kd", choice, {0: 84.0, 1: 85.0}, compute_interval([84.0, 85.0]))
    lost = TableRow("rkd", None, {}, failures=("no such layer",))
    tables = {
        name: SetTable((97.0, 96.0), alone, tuple(compare_rows(alone, [kd, lost]))) for name in SETS
    }
    account = Account(
        "COMMAND", (3, 4), (0, 1), (100,), (0.1, 1.0), {"mlkd": "no view", "at": "no view"}, 2
    )
    text = format_report(tables, account)
    assert "| `kd` | 0.1! | 84.50 ± 6.35 | +3.50 [-2.85, +9.85] |" in text
    assert (
        "Test top-1 in percent after 3 epochs of digits and 4 epochs of fonts, seeds 0 1;" in text
    )
    assert "| `rkd` |  | failed |  |  |  | 0 |" in text and "- `rkd`: no such layer" in text
    assert "| `alone` |  | 81.00 ± 12.71 |" in text and "- no view: `at`, `mlkd`" in text
    assert "seeds 100, and of up to 2 more, one at a time beyond" in text
    assert "| `kd` | +3.50 [" in text and "**digits and fonts** together:" in text
    told = json.loads(describe_report(tables, account))
    assert told["sets"]["fonts"]["rows"][0]["choice"]["validation"] == {"0.1": 85.0, "1.0": 84.0}
    assert draw_report(tables, tmp_path / "table.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--sets digit", "--sets digit: did you mean 'digits'"),
        ("--only kdd", "--only kdd: did you mean"),
        (
            "--only fsp",
            "--only fsp: matches maps of convnets; the table's student is a ViT; name an",
        ),
        ("--only kd kd", "--only contains duplicates"),
        ("--seeds 3", "--seeds needs at least 2 seeds for an interval"),
        ("--seeds 1 1", "--seeds contains duplicates"),
        ("--search-seeds 4 100", "--search-seeds (4) is one of --seeds"),
        ("--multiples 0 1", "--multiples (0) must be above 0"),
        ("--widen -1", "--widen (-1) must be at least 0"),
        ("--widen 1 --multiples 1", "--widen takes its step from --multiples, which holds one"),
        ("--epochs 0", "--epochs (0) must be at least 1"),
        ("--epochs 5 0", "--epochs (0) must be at least 1"),
        ("--epochs 5 4 3", "--epochs has 3 numbers for 2 sets; give one, or one for each"),
        ("--slots 0", "--slots (0) starts nothing"),
        ("--data-dir nowhere", "--data-dir ('nowhere') has no digits; make it by python -m"),
        ("--output-dir memory://x", "memory://x"),
    ],
)
def test_bad_flags_are_one_line_before_the_first_run(flags, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "digits").mkdir(parents=True)
    (tmp_path / "data" / "fonts").mkdir()
    try:
        code = program.main(flags.split())
    except SystemExit as error:
        code = error.code
    error = capsys.readouterr().err.strip().splitlines()
    assert code == 2 and len(error) == 1 and words in error[0]
    assert not (tmp_path / "runs").exists()


def test_a_plan_counts_the_runs_and_starts_none(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert program.main(["--plan", "--only", "kd", "dkd", "--search-seeds", "100", "101"]) == 0
    told = capsys.readouterr().out.splitlines()
    each = "2 methods, 2 teachers, 16 runs of the search, 15 of the table with the student alone"
    assert told == [f"digits: {each}", f"fonts: {each}", "66 runs"]
    assert program.main(["--plan", "--only", "kd", "--sets", "digits", "--widen", "2"]) == 0
    assert "with the student alone; the search may take 2 more" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_killed_table_continues_and_another_budget_is_refused(digits_root, tmp_path, capsys):
    flags = [
        "--data-dir",
        str(digits_root),
        "--output-dir",
        str(tmp_path),
        "--sets",
        "digits",
        "--seeds",
        "0",
        "1",
        "--multiples",
        "0.1",
        "1",
        "--epochs",
        "3",
        "--teacher-epochs",
        "3",
        "--only",
        "kd",
        "rkd",
        "--slots",
        "2",
        "--warm",
    ]
    command = [sys.executable, "-m", "proofs.kd_table", *flags]
    child = subprocess.Popen(command, cwd=ROOT, env=os.environ, start_new_session=True)
    while not list(tmp_path.glob("digits_teacher/*/run.json")):
        assert child.poll() is None
        time.sleep(0.2)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0
    jobs = [job.state for job in open_queue(str(tmp_path)).list()]
    assert jobs == ["complete"] * 12  # none was started twice
    told = json.loads((tmp_path / "kd_table" / "table.json").read_text())["sets"]["digits"]
    assert [sorted(row["scores"]) for row in (told["alone"], *told["rows"])] == [["0", "1"]] * 3
    assert program.main([*flags, "--epochs", "4"]) == 2
    assert "sweep 'digits-alone' has begun with other values" in capsys.readouterr().err
