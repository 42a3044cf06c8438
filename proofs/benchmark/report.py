"""Reports of measurements: JSON, CSV, a table."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

from utils.json_types import JsonObject

SCHEMA_VERSION = 3
_ENVIRONMENT_COLUMNS = ("git_commit", "host", "cores", "python", "runtime", "device")


def get_rate_name(result: JsonObject) -> str:
    """Return the name of a result's throughput: `img_per_s`, `tokens_per_s`."""
    return f"{result.get('unit', 'img')}_per_s"


def write_csv(report: JsonObject, path: Path) -> None:
    """Write a line for each measurement, with environment and configuration in every one."""
    rows = [create_row(report, result) for result in report["results"]]
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def create_row(report: JsonObject, result: JsonObject) -> JsonObject:
    """Flatten one measurement."""
    # A line of CSV stands alone: it repeats where it was measured.
    environment = report["environment"]
    row: JsonObject = {"created": report["created"]}
    row |= {name: environment.get(name, "") for name in _ENVIRONMENT_COLUMNS}
    row |= {f"{name}_version": version for name, version in environment["packages"].items()}
    for name, value in {**report["settings"], **result}.items():
        if isinstance(value, dict):
            row |= {f"{name}.{key}": part for key, part in value.items()}
        else:
            row[name] = json.dumps(value) if isinstance(value, list) else value
    return {**row, "config": json.dumps(report["config"])}


def print_report(report: JsonObject) -> None:
    """Print the figures as a table, one column for each measurement."""
    results = report["results"]
    print(f"{'processes':<24}" + "".join(f"{r['processes']:>14}" for r in results))
    for label, get in {**_list_rates(results[0]), **_ROWS}.items():
        cells = [get(result) for result in results]
        # A row without a figure, such as memory of a CPU, is left out.
        if any(cells):
            print(f"{label:<24}" + "".join(f"{cell or '-':>14}" for cell in cells))
    for result in results:
        if result["graphs_measured"]:
            print(f"WARNING: {result['graphs_measured']} graphs compiled in measured steps")


def _format(name: str, pattern: str, factor: float = 1) -> Callable[[JsonObject], str]:
    """Create the formatter of one figure's cells; empty if it is absent."""

    def get(result: JsonObject) -> str:
        value = result.get(name)
        return "" if value is None else pattern.format(value * factor)

    return get


def _list_rates(result: JsonObject) -> dict[str, Callable[[JsonObject], str]]:
    """Rows of the batch and of the throughput in the run's own unit."""
    name = get_rate_name(result)
    return {
        "hardware": _format("hardware", "{}"),
        "global batch": _format("global_batch_size", "{:d}"),
        f"{name.removesuffix('_per_s')}/s": _format(name, "{:.1f}"),
        "  lowest repeat": lambda result: f"{min(result[f'{name}_repeats']):.1f}",
        "  highest repeat": lambda result: f"{max(result[f'{name}_repeats']):.1f}",
    }


_ROWS: dict[str, Callable[[JsonObject], str]] = {
    "step p50 ms": _format("step_p50_s", "{:.2f}", 1e3),
    "step p95 ms": _format("step_p95_s", "{:.2f}", 1e3),
    "input stall %": _format("input_stall_share", "{:.1f}", 100.0),
    "warm-up steps": _format("warmup_steps", "{:d}"),
    "graphs": _format("graphs", "{:d}"),
    "compile s": _format("compile_s", "{:.1f}"),
    "peak host GiB": _format("peak_host_gib", "{:.2f}"),
    "peak device GiB": _format("peak_device_gib", "{:.2f}"),
    "GFLOP / example": lambda result: (
        f"{result['flops_per_example']['total'] / 1e9:.4g}" if result["flops_per_example"] else ""
    ),
    "MFU %": _format("mfu", "{:.1f}", 100.0),
    "scaling efficiency %": _format("scaling_efficiency", "{:.1f}", 100.0),
    "bare step ms": _format("bare_step_s", "{:.2f}", 1e3),
    "engine / bare": _format("engine_over_bare", "{:.3f}"),
    "  fastest blocks": _format("engine_over_bare_fastest", "{:.3f}"),
    "engine / bare, CPU time": _format("engine_over_bare_cpu", "{:.3f}"),
}
