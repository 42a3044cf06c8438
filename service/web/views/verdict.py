"""The compiler's report on a run, beside the measured values if there are any, and its cost."""

from __future__ import annotations

from service import estimates
from service.checker import Verdict
from service.web.serving import Service
from service.web.views.frame import format_bytes
from store.quality import costs
from store.quality.bill import bill_by_estimate, bill_by_runs
from store.quality.calibration import Verdicts, find_verdict, measure_step
from store.quality.costs import DevicePrice
from store.quality.list_prices import read_price_list
from store.quality.past_runs import read_past_runs
from store.query.record import RunRecord
from utils.config.load import RunConfig
from utils.errors import UserError
from utils.json_types import JsonObject

# Most runs that are searched for the time of the same step.
_MOST_RUNS = 50


def show_report(estimate: estimates.Estimate | None) -> JsonObject:
    """Create a template's values for an estimate: itself, and rows of its main figures."""
    report = None if estimate is None else estimate.report
    if report is None:
        return {"estimate": estimate}
    memory, step = report["memory"], report.get("step_ms")
    used, usable = (format_bytes(memory[name]) for name in ("peak_bytes", "usable_bytes"))
    rows = [("memory of a device", f"{used} of {usable}")]
    if step:
        rows.append(("a step", f"{step['lower']:.1f} to {step['estimate']:.1f} ms"))
    speed = report.get("units_per_s")
    if speed:
        rows.append((f"{report['unit']}/s of a device", f"{speed['estimate']:,.0f}"))
    rows.append(("examples of a device", str(report["examples_per_chip"])))
    rows += [("fault", f"{fault['text']} ({fault['count']})") for fault in report.get("faults", ())]
    return {"estimate": estimate, "told": rows}


def show_bills(
    parts: Service, config: RunConfig, verdict: Verdict, estimate: estimates.Estimate | None
) -> JsonObject:
    """Compute the run's cost, by runs of the same step and by the compiler."""
    prices, note = read_store_prices(parts.store)
    steps = estimates.read_steps(verdict.lines)
    selector = parts.runs.create_selector()
    paths = selector.select_paths(f'experiment="{config.run.experiment}" and status=complete')
    values = config.model_dump(mode="json")
    bills = [bill_by_runs(values, selector.open(paths[:_MOST_RUNS]), steps, prices)]
    if estimate is not None and estimate.report is not None:
        report = estimate.report
        devices = max(1, config.data.global_batch_size // max(1, report["examples_per_chip"]))
        known = read_past_runs(parts.store, values).calibrations
        bills.append(bill_by_estimate(report, steps, devices, prices, known))
    return {"bills": [bill for bill in bills if bill is not None], "bill_note": note}


def read_store_prices(store: str) -> tuple[list[DevicePrice], str]:
    """Read the prices beside the runs, and a note on what is missing or wrong, or empty."""
    try:
        prices, note = costs.read_store_prices(store)
    except UserError as error:
        return [], str(error)
    return prices, f"Without own prices: {read_price_list().describe()}; {note}." if note else ""


def make_verdict(record: RunRecord, verdicts: Verdicts) -> tuple[str, list[tuple[str, ...]]] | None:
    """Compare the estimate of a run's step with the measured one: its target, and rows of values.

    None if the store has no report on it.
    """
    report = find_verdict(record, verdicts)
    if report is None:
        return None
    estimate, measured = report["step_ms"]["estimate"], measure_step(record)
    times = _compare(estimate, None if measured is None else measured * 1000, "ms")
    used = record.values.get("train.peak_device_gib")
    memory = _compare(report["memory"]["peak_bytes"] / 2**30, used, "GiB")
    rows: list[tuple[str, ...]] = [("time of a step", *times), ("memory of a device", *memory)]
    return f"{report['target']}, {report['chips']} device(s)", rows


def _compare(estimate: float, measured: float | None, unit: str) -> tuple[str, str, str]:
    if measured is None:
        return f"{estimate:.2f} {unit}", "–", "–"
    return f"{estimate:.2f} {unit}", f"{measured:.2f} {unit}", f"{measured / estimate:.2f}"
