"""Prints a plan: a row for each slice, the best of them, and what a budget buys."""

from __future__ import annotations

from collections.abc import Sequence

from store.formatting import name_few
from store.quality.bill import Bill
from store.quality.list_prices import COMMITMENT, ON_DEMAND, OWN, SPOT
from store.quality.slices import (
    Load,
    SlicePlan,
    describe_bill,
    describe_plans,
    find_cheapest,
    find_fastest,
    list_bills,
)
from store.terminal import create_console, create_table

_GIB = 2**30
_TITLES = {ON_DEMAND: "on demand>", SPOT: "spot>", COMMITMENT: "1 year>", OWN: "own price>"}


def print_plans(load: Load, plans: Sequence[SlicePlan], notes: Sequence[str]) -> None:
    """Print the whole plan."""
    work = load.work
    print(
        f"{work.steps:,} steps of {work.batch}, {load.epochs:.4g} epochs; {work.evaluations} "
        f"evaluations, {work.checkpoints} checkpoints of {load.checkpoint_bytes / _GIB:.2f} GiB"
    )
    fitting = [plan for plan in plans if not plan.refusal]
    if fitting:
        create_console().print(tabulate(fitting))
    for reason in dict.fromkeys(plan.refusal for plan in plans if plan.refusal):
        names = [plan.slice.name for plan in plans if plan.refusal == reason]
        print(f"does not fit ({reason}): {name_few(names)}")
    lost = [plan.slice.name for plan in fitting if plan.has_no_end]
    if lost:
        print(f"spot has no end at this rate of preemptions: {name_few(lost)}")
    print("\n".join([*describe_plans(plans), *(f"- {note}" for note in notes)]))


def tabulate(plans: Sequence[SlicePlan]) -> object:
    """Create the table of slices that fit."""
    terms = [t for t in _TITLES if any(bill.rental.term == t for _, bill in list_bills(plans))]
    titles = ["slice", "a device>", "GiB>", "ms a step>", "hours>", "range>", "eval, saves>"]
    titles += ["hosts feed>", *(_TITLES[term] for term in terms), "spot: goodput>"]
    table = create_table(*titles)
    for plan in plans:
        batch = f"{plan.examples}" if plan.parts == 1 else f"{plan.parts} x "
        batch += "" if plan.parts == 1 else f"{plan.examples // plan.parts}"
        memory = "-" if plan.memory_bytes is None else f"{plan.memory_bytes / _GIB:.1f}"
        feed = "-" if plan.feed is None else f"{plan.feed:.1f} x" + (" waits" * (plan.feed < 1))
        bills = {bill.rental.term: bill for bill in plan.bills}
        table.add_row(
            plan.slice.name,
            batch,
            memory,
            *_format_time(plan),
            feed,
            *(_format_usd(bills.get(term)) for term in terms),
            _format_spot(bills.get(SPOT)),
        )
    return table


def list_budget(load: Load, plans: Sequence[SlicePlan], budget: float) -> list[str]:
    """Name what a budget buys: the whole run at its fastest, else a part of it."""
    best, cheapest = find_fastest(plans, budget), find_cheapest(plans)
    if best is not None:
        return [f"USD {budget:g} buys it: {describe_bill(best[0].slice.name, best[1])}"]
    if cheapest is None or not cheapest[1].usd:
        return [f"USD {budget:g}: no price is known"]
    plan, bill = cheapest
    share = budget / (bill.usd or 1.0)
    return [
        f"USD {budget:g} does not buy it: at the cheapest, {share:.0%} of it, about "
        f"{share * load.work.steps:,.0f} steps or {share * load.epochs:.3g} epochs on "
        f"{plan.slice.name}; the whole costs {describe_bill(plan.slice.name, bill)}"
    ]


def _format_time(plan: SlicePlan) -> tuple[str, str, str, str]:
    """Format the time of a step, hours, their range, and the share that does not learn."""
    bill = next((bill for bill in plan.bills if bill.rental.term != SPOT), None)
    bill = bill or next(iter(plan.bills), None)
    if plan.step is None or bill is None:
        return "-", "-", "-", "-"
    bound, high = bill.bound_hours, bill.high_hours
    other = (bill.evaluation_hours + bill.checkpoint_hours) / bill.hours
    step = f"{1000 * plan.step.estimate_s:.3g}"
    return step, f"{bill.hours:.3g}", f"{bound:.3g} to {high:.3g}", f"{other:.1%}"


def _format_usd(bill: Bill | None) -> str:
    if bill is None or bill.usd is None:
        return "-"
    return f"{bill.usd:,.0f}" if bill.usd >= 100 else f"{bill.usd:,.2f}"


def _format_spot(bill: Bill | None) -> str:
    if bill is None:
        return "-"
    times = f", {bill.preemptions:.1f} times" if bill.preemptions else ""
    return f"{bill.goodput:.1%}{times}"
