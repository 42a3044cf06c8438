"""Reports of measurements: JSON, CSV, a table, and the comparison with an earlier report."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

from utils.errors import UserError
from utils.json_types import JsonObject

SCHEMA = 2
# Earlier forms whose compared figures mean the same.
_READABLE = (1, SCHEMA)
# Figures that a comparison looks at beside the throughput, and whether more is better. Graphs may
# not grow at all.
COMPARED = {
    "peak_host_gib": False,
    "peak_device_gib": False,
    "engine_over_bare": False,
    "graphs": False,
}
_EXACT = ("graphs",)
# What must be equal for two results to be comparable.
_IDENTITY = ("hardware", "devices", "global_batch_size")
# Where a run writes, and which of several measurements of one report it was.
_FREE_KEYS = ("run.", "runtime.num_processes")
_ENVIRONMENT_COLUMNS = ("git_commit", "host", "cores", "python", "runtime", "device")


def get_rate_name(result: JsonObject) -> str:
    """The name of a result's throughput: `img_per_s`, `tokens_per_s`."""
    return f"{result.get('unit', 'img')}_per_s"


def read_report(path: Path) -> JsonObject:
    """An earlier report.

    Raises:
      UserError: it is not there, or no report of this tool.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--compare {path} cannot be read: {error}; give a --json file") from error
    if not isinstance(report, dict) or report.get("schema") not in _READABLE:
        raise UserError(
            f"--compare {path} is no report of this tool (schema {SCHEMA}); give a --json file"
        )
    return report


def write_json(report: JsonObject, path: Path) -> None:
    """The whole report."""
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def write_csv(report: JsonObject, path: Path) -> None:
    """A line for each measurement; environment and configuration in every one."""
    rows = [create_row(report, result) for result in report["results"]]
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def create_row(report: JsonObject, result: JsonObject) -> JsonObject:
    """One measurement without nesting."""
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


def compare(report: JsonObject, base: JsonObject, tolerance: float) -> list[JsonObject]:
    """Each figure beside the earlier one, for all numbers of processes that both have.

    Args:
      tolerance: share of a figure that it may be worse by.

    Returns:
      `processes`, `figure`, `base`, `now`, `change` (share, above 0 is worse), `is_regression`.

    Raises:
      UserError: the two reports are of different things.
    """
    _check_comparable(report, base)
    earlier = {result["processes"]: result for result in base["results"]}
    pairs = [
        (result, earlier[result["processes"]])
        for result in report["results"]
        if result["processes"] in earlier
    ]
    if not pairs:
        raise UserError(
            f"--compare: that report has {sorted(earlier)} processes, this one has "
            f"{[result['processes'] for result in report['results']]}; measure the same"
        )
    lines = []
    for now, before in pairs:
        for name in _IDENTITY:
            if now[name] != before[name]:
                raise UserError(
                    f"--compare: {name} is {now[name]!r} now and was {before[name]!r}; reports "
                    "compare only on the same devices and batch"
                )
        names = (get_rate_name(now), *COMPARED)
        figures = [name for name in names if None not in (now.get(name), before.get(name))]
        lines += [_compare_figure(name, now, before, tolerance) for name in figures]
    return lines


def print_report(report: JsonObject) -> None:
    """The figures as a table, one column for each measurement."""
    results = report["results"]
    print(f"{'processes':<24}" + "".join(f"{r['processes']:>14}" for r in results))
    for label, get in {**_list_rates(results[0]), **_ROWS}.items():
        cells = [get(result) for result in results]
        if any(cells):
            print(f"{label:<24}" + "".join(f"{cell or '-':>14}" for cell in cells))
    for result in results:
        if result["graphs_measured"]:
            print(f"WARNING: {result['graphs_measured']} graphs compiled in measured steps")


def print_comparison(lines: list[JsonObject], tolerance: float) -> None:
    """What has changed, and whether it may."""
    print(f"{'processes':<11}{'figure':<20}{'base':>12}{'now':>12}{'worse by':>10}")
    for line in lines:
        verdict = "REGRESSION" if line["is_regression"] else ""
        print(
            f"{line['processes']:<11}{line['figure']:<20}{line['base']:>12.4g}{line['now']:>12.4g}"
            f"{line['change']:>+10.1%} {verdict}"
        )
    print(f"tolerance {tolerance:.1%}; graphs none")


def _check_comparable(report: JsonObject, base: JsonObject) -> None:
    now, before = _flatten(report["config"]), _flatten(base["config"])
    now["--input"], before["--input"] = report["settings"]["input"], base["settings"]["input"]
    different = sorted(key for key in now.keys() | before.keys() if now.get(key) != before.get(key))
    different = [key for key in different if not key.startswith(_FREE_KEYS)]
    if different:
        key = different[0]
        raise UserError(
            f"--compare: {key} is {now.get(key)!r} now and was {before.get(key)!r} "
            f"({len(different)} keys differ); measure the same configuration"
        )


def _flatten(values: JsonObject, prefix: str = "") -> JsonObject:
    flat: JsonObject = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _compare_figure(name: str, now: JsonObject, before: JsonObject, tolerance: float) -> JsonObject:
    old, new = before[name], now[name]
    worse_by = old - new if COMPARED.get(name, True) else new - old
    change = worse_by / old if old else float(worse_by > 0)
    limit = 0.0 if name in _EXACT else tolerance
    return {
        "processes": now["processes"],
        "figure": name,
        "base": old,
        "now": new,
        "change": change,
        "is_regression": change > limit,
    }


def _format(name: str, pattern: str, factor: float = 1) -> Callable[[JsonObject], str]:
    """A cell's text for one figure; empty where it is absent."""

    def get(result: JsonObject) -> str:
        value = result.get(name)
        return "" if value is None else pattern.format(value * factor)

    return get


def _list_rates(result: JsonObject) -> dict[str, Callable[[JsonObject], str]]:
    """Rows of the batch and of the throughput in the run's own unit."""
    name = get_rate_name(result)
    return {
        "global batch": _format("global_batch_size", "{:d}"),
        f"{name.removesuffix('_per_s')}/s": _format(name, "{:.1f}"),
        "  lowest repeat": lambda result: f"{min(result[f'{name}_repeats']):.1f}",
        "  highest repeat": lambda result: f"{max(result[f'{name}_repeats']):.1f}",
    }


_ROWS = {
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
