"""Gates: every kind of limit in both directions, and the three outcomes of seeds."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from store.compare.sides import Side
from store.quality.gates import (
    SEVERITIES,
    check_samples,
    check_sides,
    get_code,
    make_gate,
    parse_gate,
    resolve_direction,
)
from store.query.record import RunRecord
from tests.support.stored_runs import make_config, make_run
from utils.errors import UserError

# Kind of case -> limits, base, change for the worse, what must come of it. With a `?` what is
# absent is skipped.
CASES = {
    "pct": [
        ("2:-", 50.0, 1.01, "fail"),
        ("2:-", 50.0, 1.0, "pass"),
        ("0:-", 50.0, -3.0, "pass"),
        ("2:-", -50.0, 1.01, "fail"),
        ("2:-", -50.0, 1.0, "pass"),
    ],
    "abs": [
        ("-:0.5", 50.0, 0.51, "fail"),
        ("-:0.5", 50.0, 0.5, "pass"),
        ("-:0", 50.0, -3.0, "pass"),
        ("-:0", 50.0, 0.0, "pass"),
    ],
    "both": [
        ("2:5", 50.0, 1.01, "fail"),
        ("20:0.5", 50.0, 0.51, "fail"),
        ("2:1", 50.0, 1.0, "pass"),
        ("0:0", 50.0, -3.0, "pass"),
    ],
    # A percentage of zero says nothing, in whichever direction the number has gone.
    "zero": [
        ("2:-", 0.0, -1.0, "fail"),
        ("2:-", 0.0, 0.0, "fail"),
        ("2:0.5", 0.0, 0.4, "pass"),
        ("2:0.5", 0.0, 0.6, "fail"),
        ("-:0.5", 0.0, 0.4, "pass"),
    ],
    "missing": [
        ("2:-", 50.0, None, "absent"),
        ("-:9", None, 1.0, "absent"),
        ("2:9", None, None, "absent"),
    ],
    "non-finite": [
        ("2:-", 50.0, math.nan, "absent"),
        ("-:9", 50.0, math.inf, "absent"),
        ("2:9", 50.0, -math.inf, "absent"),
        ("2:9", math.nan, 0.0, "absent"),
    ],
}
LEVELS = (*SEVERITIES, "major?")


@pytest.mark.parametrize(
    ("case", "direction", "severity"), itertools.product(CASES, ("higher", "lower"), LEVELS)
)
def test_a_gate_compares_single_runs(tmp_path, case, direction, severity):
    for number, (limits, base, change, expected) in enumerate(CASES[case]):
        gate = replace(parse_gate(f"eval.x:{limits}:{severity}"), direction=direction)
        sign = 1 if direction == "lower" else -1
        new = None if change is None else (base or 0.0) + change * sign
        values = {f"a{number}": base, f"b{number}": new}
        runs = [
            make_run(tmp_path, name, final={} if value is None else {"eval_x": value})
            for name, value in values.items()
        ]
        found = check_sides(gate, *(Side(run.path.name, (RunRecord(run.path),)) for run in runs))
        if expected == "absent":
            expected = "skipped" if gate.is_optional else "fail"
        assert found.outcome == expected, found
        assert found.is_grave == (severity != "minor")
        assert get_code([found]) == int(expected == "fail" and severity != "minor")
        assert found.reason


def test_gates_are_tested_with_48_kinds_of_cases():
    assert len(list(itertools.product(CASES, ("higher", "lower"), LEVELS))) == 48


@pytest.mark.parametrize("value", [None, math.nan])
def test_an_optional_number_may_be_missing(tmp_path, value):
    gate = parse_gate("eval.top1:-:1:blocker?")
    final = {} if value is None else {"eval_top1": value}
    runs = [
        make_run(tmp_path, "a", final={"eval_top1": 1.0}),
        make_run(tmp_path, "b", final=final, lines=[{"step": 1, "kind": "train"}]),
    ]
    sides = [Side(run.path.name, (RunRecord(run.path),)) for run in runs]
    found = check_sides(resolve_direction(gate), *sides)
    assert found.outcome == "skipped" and "digits/b" in found.reason


def test_seeds_have_three_outcomes():
    gate = resolve_direction(parse_gate("eval.top1:-:1:blocker"))
    draw = random.Random(4)
    base = {seed: 80 + draw.gauss(0, 0.3) for seed in range(5)}
    for fall, expected in ((3.0, "fail"), (0.0, "pass"), (1.0, "undecided")):
        new = {seed: value - fall + draw.gauss(0, 0.2) for seed, value in base.items()}
        found = check_samples(gate, base, new)
        assert found.outcome == expected, found
        assert found.low < found.worse < found.high and found.limit == 1.0
    # One run against several: nobody knows how much is chance.
    assert check_samples(gate, base, {0: 10.0}).outcome == "undecided"
    assert check_samples(gate, base, {}).outcome == "fail"


def test_noise_neither_fails_nor_passes_a_gate_by_chance():
    """Where the truth lies at the limit, a gate over seeds may decide in 5 % of the cases alone."""
    gate, draw, decided = resolve_direction(parse_gate("eval.loss:-:1:major")), random.Random(5), 0
    for _ in range(500):
        base = {("a", i): draw.gauss(5, 1) for i in range(4)}
        new = {("b", i): draw.gauss(6, 1) for i in range(4)}
        decided += check_samples(gate, base, new).outcome != "undecided"
    assert decided / 500 < 0.09


def test_aggregates_cover_the_whole_history(tmp_path):
    values = [1.0, 9.0, 3.0, 5.0]
    lines = [{"step": step, "kind": "eval", "top1": value} for step, value in enumerate(values, 1)]
    record = RunRecord(make_run(tmp_path, "a", lines=lines, final={"eval_top1": 5.0}).path)
    worse = RunRecord(make_run(tmp_path, "b", lines=lines[:1], final={"eval_top1": 1.0}).path)
    for aggregate, expected in (
        ("last", 5.0),
        ("best", 9.0),
        ("mean", 4.5),
        ("median", 4.0),
        ("min", 1.0),
        ("max", 9.0),
        ("p50", 3.0),
    ):
        gate = resolve_direction(parse_gate(f"eval.top1@{aggregate}:-:0:major"))
        found = check_sides(gate, Side("a", (record,)), Side("b", (worse,)))
        assert (found.base, found.new) == (expected, 1.0)
    best = resolve_direction(parse_gate("eval.top1@best:-:0:major"))
    found = check_sides(best, Side("a", (record,)), Side("b", (worse,)))
    assert "unequal numbers of evaluations: [1, 4]" in found.reason
    lines[1] = {**lines[1], "top1": None, "nonfinite": {"top1": "nan"}}
    spoilt = RunRecord(make_run(tmp_path, "c", lines=lines).path)
    assert check_sides(best, Side("a", (record,)), Side("c", (spoilt,))).outcome == "fail"


def test_runs_of_equal_seeds_are_paired(tmp_path):
    sides = []
    for name, fall in (("a", 0.0), ("b", 0.1)):
        runs = [
            make_run(
                tmp_path,
                f"{name}{seed}",
                config=make_config(**{"train.seed": seed}),
                final={"eval_top1": 50 + 10 * seed - fall - seed / 100},
            )
            for seed in range(4)
        ]
        sides.append(Side(name, tuple(RunRecord(run.path) for run in runs)))
    found = check_sides(resolve_direction(parse_gate("eval.top1:-:0.5:major")), *sides)
    assert found.outcome == "pass" and "paired" in found.reason


def test_repeated_runs_of_a_seed_do_not_make_a_gate_significant(tmp_path):
    sides = []
    for name, values in (("a", (80.0, 80.0, 80.0)), ("b", (79.0, 79.0, 79.0))):
        runs = [
            make_run(
                tmp_path,
                f"{name}{n}",
                config=make_config(**{"train.seed": name == "b"}),
                final={"eval_top1": value},
            )
            for n, value in enumerate(values)
        ]
        sides.append(Side(name, tuple(RunRecord(run.path) for run in runs)))
    found = check_sides(resolve_direction(parse_gate("eval.top1:-:0.5:major")), *sides)
    assert (found.outcome, found.low, found.base_n, found.new_n) == ("fail", None, 1, 1)
    assert "a has 3 runs of 1 seed; b has 3 runs of 1 seed" in found.reason


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("eval.top1", "four parts"),
        ("eval.top1:-:-:major", "no limit"),
        (":1:-:major", "no metric"),
        ("eval.top1:x:-:major", "from 0 up"),
        ("eval.top1:-1:-:major", "from 0 up"),
        ("eval.top1:nan:-:major", "from 0 up"),
        ("eval.top1:1:-:grave", "unknown severity"),
        ("eval.top1@mode:1:-:major", "unknown aggregate"),
        ("eval.top1@p100:1:-:minor", "aggregate"),
    ],
)
def test_a_gate_with_a_fault_is_refused_in_one_line(text, word):
    with pytest.raises(UserError) as caught:
        parse_gate(text)
    assert word in str(caught.value)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"metric": "a", "max_pc": 1}, "did you mean 'max_pct'"),
        ({"metric": 3}, "no metric"),
        ({"metric": "a", "max_abs": True}, "from 0 up"),
        ({"metric": "a"}, "no limit"),
        ({"metric": "a", "max_abs": 1, "optional": "x"}, "true or false"),
        ({"metric": "a", "max_abs": 1, "direction": "up"}, "higher or lower"),
    ],
)
def test_an_entry_of_a_file_with_a_fault_is_refused(values, word):
    with pytest.raises(UserError) as caught:
        make_gate(values, "a")
    assert word in str(caught.value)


def test_an_unknown_direction_is_refused_not_guessed():
    assert resolve_direction(parse_gate("eval.loss:1:-:major")).direction == "lower"
    for metric, word in (("eval.charm", "no catalogue"), ("train.lr", "no better direction")):
        with pytest.raises(UserError, match=word):
            resolve_direction(parse_gate(f"{metric}:1:-:major"))
