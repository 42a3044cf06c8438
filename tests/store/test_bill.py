"""Bills against closed forms: no preemption, constant machine lives, and a constant rate."""

from __future__ import annotations

import itertools
import math
import time

import pytest

from store.quality.bill import Rental, RunWork, StepTime, bill_by_runs, compute_bill
from store.quality.costs import DevicePrice, compute_cost
from store.quality.goodput import NEVER, Interruptions, run_once, simulate
from store.quality.list_prices import (
    ON_DEMAND,
    OWN,
    SPOT,
    TERMS,
    find_chip_prices,
    list_missing,
    read_price_list,
)
from store.query.record import RunRecord
from tests.support.stored_runs import make_config, make_run
from utils.generations import GENERATIONS

STEP = StepTime(0.5, 1.0, 0.8, 1.5, "told")
WORK = RunWork(steps=3600, batch=8, evaluations=4, eval_batches=100, eval_share=0.5, checkpoints=10)


def rent(term: str = SPOT, usd: float | None = 2.0) -> Rental:
    return Rental("TPU v5e", 4, usd, term)


def test_a_run_without_preemptions_costs_what_its_parts_take():
    bill = compute_bill(WORK, STEP, rent(), Interruptions(resume_s=300.0))
    # 3,600 steps and 4 evaluations of 100 batches that cost half a step: 3,800 s.
    assert bill.hours == pytest.approx((3800 + 300) / 3600)
    assert bill.bound_hours == pytest.approx((1900 + 300) / 3600)
    assert (bill.low_hours, bill.high_hours) == pytest.approx((3340 / 3600, 6000 / 3600))
    assert bill.usd == pytest.approx(4 * 2.0 * 4100 / 3600)
    assert bill.evaluation_hours == pytest.approx(200 / 3600)
    assert bill.goodput == pytest.approx(3600 / 4100)
    assert (bill.preemptions, bill.wall_hours) == (0.0, bill.hours)


def test_checkpoints_hold_the_loop_and_slow_hosts_every_step():
    held = compute_bill(
        RunWork(100, checkpoints=5, held_s=20.0), StepTime.exact(1.0, "told"), rent()
    )
    assert held.checkpoint_hours == pytest.approx(100 / 3600)
    assert held.hours == pytest.approx(200 / 3600)
    # The hosts prepare 4 examples a second: a step of 8 takes 2 s, whatever the chip needs.
    slow = compute_bill(RunWork(100, batch=8), STEP, rent(), feed_per_s=4.0)
    assert slow.hours == slow.bound_hours == slow.high_hours == pytest.approx(200 / 3600)
    fast = compute_bill(RunWork(100, batch=8), STEP, rent(), feed_per_s=1000.0)
    assert fast.hours == pytest.approx(100 / 3600)


def test_machines_of_constant_life_complete_whole_segments_only():
    stops = Interruptions(restart_s=600.0, resume_s=100.0)
    # Each life of 1,000 s holds 900 s of work: 3 segments of 250 s, and 150 s are lost.
    run = run_once(2000.0, 250.0, stops, itertools.repeat(1000.0))
    assert run.preemptions == 2
    assert run.paid_s == pytest.approx(2 * 1000 + 100 + 500)
    assert run.waited_s == 1200.0
    assert run.wall_s == run.paid_s + run.waited_s
    # One that dies before its first checkpoint never gets anywhere.
    assert run_once(2000.0, 950.0, stops, itertools.repeat(1000.0)) is None
    assert run_once(2000.0, 250.0, stops, itertools.repeat(math.inf)).paid_s == 2100.0


def compute_expected_s(work_s: float, segment_s: float, stops: Interruptions) -> float:
    """The expected paid time at a constant rate, segment by segment (as in Daly 2006)."""
    rate = stops.per_day / 86_400
    again = math.expm1(rate * (stops.resume_s + segment_s)) / rate
    lost = -math.expm1(-rate * segment_s)
    return again + (work_s / segment_s - 1) * lost * (1 / rate + again)


@pytest.mark.parametrize("per_day", [1.0, 12.0, 48.0])
def test_a_constant_rate_takes_what_the_closed_form_says(per_day):
    stops = Interruptions(per_day, restart_s=600.0, resume_s=300.0, trials=3000, seed=1)
    simulation = simulate(36_000.0, 1800.0, stops)
    assert simulation.mean.paid_s == pytest.approx(
        compute_expected_s(36_000.0, 1800.0, stops), rel=0.03
    )
    # Preemptions come at the rate while a machine is paid for.
    expected = per_day * simulation.mean.paid_s / 86_400
    assert simulation.mean.preemptions == pytest.approx(expected, rel=0.05)
    assert simulation.mean.waited_s == pytest.approx(600 * simulation.mean.preemptions)
    assert simulation.low_s <= simulation.mean.paid_s <= simulation.high_s


def test_a_simulation_is_a_function_of_its_seed_and_tells_when_there_is_no_end():
    stops = Interruptions(10.0, 60.0, 60.0, seed=3)
    assert simulate(7200.0, 600.0, stops) == simulate(7200.0, 600.0, stops)
    assert simulate(7200.0, 600.0, NEVER).mean.paid_s == 7200.0
    assert simulate(86_400.0, 43_200.0, Interruptions(100.0)) is None
    assert compute_bill(RunWork(86_400), STEP, rent(), Interruptions(1000.0)) is None


def test_only_spot_is_preempted():
    stops = Interruptions(48.0, 600.0, 300.0)
    spot, other = (compute_bill(WORK, STEP, rent(term), stops) for term in (SPOT, ON_DEMAND))
    assert spot.preemptions > 0 and other.preemptions == 0
    assert spot.hours > other.hours and spot.goodput < other.goodput
    assert spot.wall_hours > spot.hours


def test_a_bill_without_a_price_has_hours_alone():
    bill = compute_bill(WORK, STEP, rent(usd=None))
    assert bill.usd is None and bill.hours > 0


def test_the_bill_of_a_finished_run_is_what_it_cost(tmp_path):
    """Billing a run again, by the run itself, gives its own device-hours and money."""
    config = make_config(**{"data.global_batch_size": 64})
    run = make_run(tmp_path, "a", config=config, final={"eval_top1": 50.0})
    (run.path / "attempts.jsonl").write_text(
        '{"attempt": 1, "host": "vm", "pid": 1, "began": 1.79e9, "from_step": 0, "hardware": '
        '{"chip": "TPU v5e", "hardware": "TPU", "devices": 8}}\n'
        '{"attempt": 1, "ended": 1790007200.0, "to_step": 4, "status": "complete"}\n'
    )
    record = RunRecord(run.path)
    own = [DevicePrice(device="TPU v5e", since="2026-01-01", usd_per_device_hour=0.5)]
    bill, cost = bill_by_runs(config, [record], None, own), compute_cost(record, own)
    assert bill.devices * bill.hours == pytest.approx(cost.device_hours) == pytest.approx(16.0)
    assert bill.usd == pytest.approx(cost.usd) == pytest.approx(8.0)
    # Twice the steps cost twice; without an own price the list's is taken, on demand.
    listed = bill_by_runs(config, [record], 8, [])
    assert listed.hours == pytest.approx(4.0)
    assert listed.usd == pytest.approx(32 * 1.2) and listed.rental.term == ON_DEMAND


def test_the_price_list_names_its_source_and_what_it_has_not():
    prices = read_price_list()
    assert prices.source and prices.read.year >= 2026 and "commitment_1y" in prices.missing
    assert prices.usd_per_chip_hour.keys() <= GENERATIONS.keys()
    for regions in prices.usd_per_chip_hour.values():
        for terms in regions.values():
            assert terms.spot is None or terms.on_demand is None or terms.spot < terms.on_demand


def test_the_cheapest_region_of_each_term_is_taken_and_own_prices_come_first():
    now = time.time()
    regions = read_price_list().usd_per_chip_hour["v6e"]
    found = {price.term: price for price in find_chip_prices("v6e", (), now)}
    for term in (ON_DEMAND, SPOT):
        assert found[term].usd == min(getattr(t, term) or math.inf for t in regions.values())
    there = find_chip_prices("v6e", (), now, "europe-west4")
    assert [(p.term, p.region, p.usd) for p in there] == [
        (ON_DEMAND, "europe-west4", 2.97),
        (SPOT, "europe-west4", 1.782),
    ]
    own = [DevicePrice(device="TPU v6e", since="2026-01-01", usd_per_device_hour=0.25)]
    assert [(p.term, p.usd) for p in find_chip_prices("v6e", own, now)] == [(OWN, 0.25)]
    assert list_missing("v6e", find_chip_prices("v6e", own, now)) == []
    assert find_chip_prices("v3", (), now) == []
    assert list_missing("v3", []) == [f"v3 {term}" for term in TERMS]
