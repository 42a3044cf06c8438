"""Plans of slices: what fits, how long it takes, and which is the cheapest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from store.quality.bill import PUBLISHED_RATIOS, RunWork
from store.quality.calibration import Calibration, hash_step
from store.quality.list_prices import ON_DEMAND, OWN, read_price_list
from store.quality.past_runs import PastRuns
from store.quality.slices import (
    PUBLISHED_FACTORS,
    Assumptions,
    Load,
    find_cheapest,
    find_fastest,
    list_slices,
    plan_slices,
)
from tests.support.stored_runs import make_config
from utils.generations import LAUNCHED

GIB = 2**30
LOAD = Load(
    values=make_config(**{"data.global_batch_size": 256}),
    work=RunWork(steps=1000, batch=256),
    epochs=1.0,
    parts=None,
    train_flops=197e12 / 256,  # a step takes a second of one v5e at its peak
    state_bytes=GIB,
    checkpoint_bytes=GIB,
    example_bytes=0,
)
DEMAND = Assumptions(terms=(ON_DEMAND, OWN))


def plan(load: Load = LOAD, assumptions: Assumptions = DEMAND, most: int = 8) -> dict:
    return {item.slice.name: item for item in plan_slices(load, list_slices(most), assumptions)}


def test_all_slices_that_are_launched_are_tried():
    names = [item.name for item in list_slices(8)]
    assert {"v5litepod-8", "v6e-1", "v5p-8", "v4-16"} <= set(names)
    assert {item.generation.name for item in list_slices(8)} == {row.name for row in LAUNCHED}
    chips = {item.name: (item.chips, item.devices) for item in list_slices(8)}
    # v4 counts cores, of which the compiler sees each; v5p counts cores and is compiled by chip.
    assert chips["v4-16"] == (8, 16)
    assert chips["v5p-16"] == (8, 8)
    assert chips["v5litepod-8"] == (8, 8)


def test_the_bound_is_the_peak_and_published_steps_give_the_estimate():
    step = plan()["v5litepod-1"].step
    moved_s = 2 * GIB / 819e9
    assert step.bound_s == pytest.approx(1.0)
    for seconds, factor in zip(
        (step.low_s, step.estimate_s, step.high_s), PUBLISHED_FACTORS, strict=True
    ):
        assert seconds == pytest.approx((1.0 + moved_s) * factor)
    assert plan()["v5litepod-8"].step.bound_s == pytest.approx(1 / 8)
    assert "counted" in step.basis
    assert plan(replace(LOAD, train_flops=None))["v6e-1"].bills == ()


def test_a_batch_that_does_not_fit_is_split_until_it_does():
    load = replace(LOAD, example_bytes=GIB // 8)  # 32 GiB of 256 examples, and 1 GiB
    plans = plan(load)
    assert (plans["v5litepod-1"].parts, plans["v5litepod-1"].examples) == (4, 256)
    assert plans["v5litepod-1"].memory_bytes == 9 * GIB
    assert plans["v6e-1"].parts == 2
    assert plans["v5litepod-8"].parts == 1
    huge = plan(replace(load, state_bytes=40 * GIB))
    assert huge["v5litepod-8"].refusal == "memory" and huge["v5litepod-8"].bills == ()
    assert not huge["v5p-8"].refusal
    fixed = plan(replace(load, parts=1))
    assert fixed["v5litepod-1"].refusal == "memory"


def test_a_batch_is_divided_evenly_or_not_at_all():
    plans = plan(replace(LOAD, work=RunWork(1000, batch=12)))
    assert "batch of 12" in plans["v5litepod-8"].refusal
    assert plans["v5litepod-4"].examples == 3


def test_a_verdict_of_the_compiler_is_taken_with_the_calibrations_range():
    key = ("v5e", 1, 32, hash_step(LOAD.values))
    verdict = {"step_ms": {"lower": 10.0, "estimate": 40.0}, "target": "v5e:2x4"}
    verdict["memory"] = {"peak_bytes": 3 * GIB}
    plans = plan(LOAD, replace(DEMAND, past=PastRuns({key: verdict})))
    told, other = plans["v5litepod-8"], plans["v5litepod-4"]
    low, high = PUBLISHED_RATIOS
    assert told.step.bound_s == 0.01
    assert (told.step.low_s, told.step.high_s) == pytest.approx((0.04 * low, 0.04 * high))
    assert told.memory_bytes == 3 * GIB
    assert "verdict" in told.step.basis and "counted" in other.step.basis
    past = PastRuns({key: verdict}, {"v5e": Calibration(3, 1.1, 0.9, 1.5, 0.2)})
    step = plan(LOAD, replace(DEMAND, past=past))["v5litepod-8"].step
    assert (step.low_s, step.estimate_s, step.high_s) == pytest.approx((0.036, 0.044, 0.06))


def test_a_finished_run_is_taken_before_all_else():
    plans = plan(LOAD, replace(DEMAND, past=PastRuns(measured={("v5e", 8): (0.25, "digits/a")})))
    step = plans["v5litepod-8"].step
    assert step.bound_s == step.high_s == 0.25 and "digits/a" in step.basis
    assert plans["v5litepod-8"].bills[0].hours == pytest.approx(1000 * 0.25 / 3600)


def test_hosts_that_cannot_feed_their_chips_make_them_wait():
    quick = plan()["v6e-8"]
    slow = plan(LOAD, replace(DEMAND, cpu_ms=10_000.0))["v6e-8"]
    assert quick.feed is None and slow.feed < 1
    # 180 vCPUs prepare 18 examples a second.
    assert slow.bills[0].hours == pytest.approx(1000 * 256 / 18 / 3600)
    assert slow.feed == pytest.approx(18 * slow.step.estimate_s / 256)


def test_the_cheapest_and_the_fastest_are_named_and_a_budget_limits_them():
    plans = list(plan(most=32).values())
    cheapest, fastest = find_cheapest(plans), find_fastest(plans)
    bills = [bill for item in plans for bill in item.bills]
    assert cheapest[1].usd == min(bill.usd for bill in bills if bill.usd is not None)
    assert fastest[1].wall_hours == min(bill.wall_hours for bill in bills)
    assert fastest[0].slice.chips == 32
    usd = 1.01 * cheapest[1].usd
    assert find_fastest(plans, usd)[1].usd <= usd
    assert find_fastest(plans, 0.5 * cheapest[1].usd) is None
    # Money is chips, hours and the list's price.
    price = read_price_list().usd_per_chip_hour["v6e"]["us-central1"].on_demand
    v6e = next(item for item in plans if item.slice.name == "v6e-8")
    assert v6e.bills[0].usd == pytest.approx(8 * v6e.bills[0].hours * price)
