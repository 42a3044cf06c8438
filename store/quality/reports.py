"""Figures of reports, and what must be equal to compare two of them.

Reports are those of `proofs.benchmark` and of labs and the estimates of `tools.compile_for_tpu`.
Versions of the software may differ: whether a newer compiler makes a step slower is the question.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from store.quality.field_types import is_number
from store.query.config_text import flatten_run_config
from store.record.catalogue import Metric, MetricRegistry
from utils.errors import UserError
from utils.json_types import JsonObject, JsonValue

Kind = Literal["benchmark", "verdict", "lab"]
BENCHMARK, VERDICT, LAB = "benchmark", "verdict", "lab"
# Where a run writes, and which of several measurements of a report it was.
_FREE_KEYS = ("run.", "runtime.num_processes")
_SHARED = ("hardware", "devices", "global_batch_size", "unit")
_STEP = ("target", "chips", "examples_per_chip")
# Of each lab: the form of its reports, settings that all rows share, and the name of a row.
_LABS = {
    "delta": (
        2,
        ("on", "width", "chunk", "solver", "loop", "precision"),
        "{variant} {form} {mode} {key_heads}/{value_heads} {batch}x{tokens}",
    ),
    "matmul": (1, ("on", "base"), "{axis} {size}"),
}
_LAB_COSTS = {
    "mcycles_with_dma": "bundles_mcycles",
    "mcycles_estimate": "estimated_mcycles",
    "hbm_bytes": "hbm_bytes",
    "peak_bytes": "peak_bytes",
}
# Figures of an estimate; its compile time depends on the host.
_ESTIMATES = (
    "estimated_mcycles",
    "bundles_mcycles",
    "hbm_bytes",
    "collective_bytes",
    "max_batch_per_chip",
)

FIGURES = MetricRegistry(
    Metric("*_per_s", "1/s", "higher", "clock", "what a run's task counts, by the clock"),
    Metric("ms", "ms", "lower", "clock", "time of one execution"),
    Metric("step_p50_s", "s", "lower", "clock", "half of the steps are faster"),
    Metric("step_p95_s", "s", "lower", "clock", "nineteen of twenty steps are faster"),
    Metric("input_stall_share", "", "lower", "clock", "share of the time without a batch"),
    Metric("compile_s", "s", "lower", "clock", "time of compiling"),
    Metric("graphs", "graphs", "lower", "resource", "graphs compiled"),
    Metric("peak_host_gib", "GiB", "lower", "resource", "most resident memory of a rank"),
    Metric("peak_device_gib", "GiB", "lower", "resource", "most memory on the device"),
    Metric("engine_over_bare", "", "lower", "clock", "time of a step over a bare loop's"),
    Metric("estimated_mcycles", "Mcyc", "lower", "deterministic", "estimate of a step's cycles"),
    Metric("bundles_mcycles", "Mcyc", "lower", "deterministic", "bundles of a step and DMA waits"),
    Metric("peak_bytes", "B", "lower", "deterministic", "estimate of a device's memory"),
    Metric("hbm_bytes", "B", "lower", "deterministic", "bytes a step moves to and from HBM"),
    Metric("collective_bytes", "B", "lower", "deterministic", "bytes that collectives carry"),
    Metric("max_batch_per_chip", "", "higher", "deterministic", "largest batch that fits"),
    Metric("layout_copies", "", "lower", "deterministic", "copies that change a layout"),
    Metric("layout_mcycles", "Mcyc", "lower", "deterministic", "estimated cycles of these copies"),
    Metric("padded_share", "", "lower", "deterministic", "share of HBM bytes that are padding"),
    Metric("float32_products", "", "lower", "deterministic", "products with a float32 operand"),
    Metric("host_ops", "", "lower", "deterministic", "operators of a step that run on the host"),
    Metric("faults", "", "lower", "deterministic", "known faults found in a program"),
)
# Small edits of a program change figures by this share: less is no difference.
COMPILER_NOISE = 0.05


def read_report(path: Path, flag: str) -> JsonObject:
    """Read a report or estimate from a file; UserError, which names the flag, if it is neither."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"{flag} {path} cannot be read: {reason}; give a --json file of proofs.benchmark or "
            "tools.compile_for_tpu"
        ) from error
    try:
        get_kind(report)
        get_conditions(report)
        read_figures(report)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(
            f"{flag} {path} is no report of proofs.benchmark and no verdict of "
            f"tools.compile_for_tpu ({error}); give one of their --json files"
        ) from error
    return report


def get_kind(report: JsonObject) -> Kind:
    """Return the kind of a report; ValueError if it is none of them or of an unknown version."""
    if not isinstance(report, dict):
        raise ValueError("it holds no object")
    # Reports of benchmarks called it "schema" before their third form.
    version = report.get("schema_version", report.get("schema"))
    if version in (1, 2, 3) and isinstance(report.get("results"), list):
        if not report["results"]:
            raise ValueError("it holds no results")
        return BENCHMARK
    if "estimated_mcycles" in report and version in (2, 3, 4):
        return VERDICT
    if version == _LABS.get(report.get("lab", ""), (0,))[0] and report["rows"]:
        return LAB
    raise ValueError(f"its form is {version!r}")


def get_conditions(report: JsonObject) -> dict[str, JsonValue]:
    """Return all that comparable reports have in common; keys of a benchmark: `2 x hardware`."""
    kind = get_kind(report)
    if kind == VERDICT:
        return {name: report[name] for name in _STEP}
    if kind == LAB:
        _, names, of_row = _LABS[report["lab"]]
        shared = {f"--{name}": report["settings"][name] for name in names}
        return {**shared, "rows": [of_row.format(**row) for row in report["rows"]]}
    conditions = get_settings(report["config"], report["settings"]["input"])
    for row in report["results"]:
        conditions |= {f"{row['processes']} x {name}": row.get(name) for name in _SHARED}
    return conditions


def read_config(report: JsonObject) -> dict[str, JsonValue]:
    """Return dotted key -> value of the configuration, or the lab's flags; {} if unknown."""
    if get_kind(report) == LAB:
        return dict(report["settings"])
    config = report.get("configuration" if get_kind(report) == VERDICT else "config")
    return flatten_run_config(config) if isinstance(config, dict) else {}


def get_settings(config: JsonObject, source: str) -> dict[str, JsonValue]:
    """Return a benchmark's conditions known before measuring; `source` is its `--input`."""
    return {**_drop_free_keys(flatten_run_config(config)), "--input": source}


def get_identity(report: JsonObject) -> str:
    """Hash all that the reports of one series have in common.

    For an estimate that is more than `--compare` needs: its whole configuration, and the shapes.

    Raises:
      UserError: an estimate does not contain its configuration.
    """
    kind = get_kind(report)
    if kind == VERDICT:
        if not (compiled := report.get("configuration")):
            raise UserError(
                "this verdict does not contain its configuration (schema_version "
                f"{report['schema_version']}); compile it again"
            )
        results: JsonValue = {name: report[name] for name in (*_STEP, "unit", "example")}
        config, source = flatten_run_config(compiled), VERDICT
    elif kind == LAB:
        config: dict[str, JsonValue] = {}
        source, results = LAB, get_conditions(report)
    else:
        names = ("processes", *_SHARED)
        results = [{name: row.get(name) for name in names} for row in report["results"]]
        config, source = flatten_run_config(report["config"]), report["settings"]["input"]
    text = json.dumps([_drop_free_keys(config), source, results], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def name_report(report: JsonObject) -> str:
    """Return `<time>-<commit>`, which sorts by time."""
    if get_kind(report) == VERDICT:
        return f"{report['made'].replace(' ', 'T')}-{report.get('git_commit') or 'unknown'}"
    return f"{report['created']}-{report['environment']['git_commit'] or 'unknown'}"


def describe_report(report: JsonObject) -> str:
    """Describe what was measured or compiled, in a few words."""
    if get_kind(report) == VERDICT:
        return f"{report['model']} for {report['target']}, {report['examples_per_chip']} a device"
    if get_kind(report) == LAB and report["lab"] != "delta":
        return f"lab of {report['lab']} on {report['settings']['on']}"
    if get_kind(report) == LAB:
        rules = ", ".join(dict.fromkeys(row["variant"] for row in report["rows"]))
        return f"lab of delta rules on {report['settings']['on']}: {rules}"
    first = report["results"][0]
    model = report["config"].get("model", {}).get("name", "?")
    # Few devices have a name of their own; all are of one type.
    hardware = first.get("hardware") or report["environment"].get("device") or "unnamed hardware"
    return f"{model} on {hardware}, batch {first.get('global_batch_size')}"


def get_versions(report: JsonObject) -> dict[str, str]:
    """Return the versions of the packages that made a report."""
    if get_kind(report) == VERDICT:
        return report.get("versions", {})
    return report["environment"].get("packages", {})


def read_figures(report: JsonObject) -> dict[str, float | None]:
    """Return figure -> value; None if it was not measured, or is not finite.

    Names contain the number of processes, `2 x img_per_s`, or the lab's row:
    `gdn xla forward 16/32 1x8192 x bundles_mcycles`.
    """
    if get_kind(report) == VERDICT:
        values = {name: report.get(name) for name in _ESTIMATES}
        values["peak_bytes"] = report["memory"]["peak_bytes"]
        values["faults"] = len(report.get("faults") or ())
        layout = report.get("layout") or {}
        values |= {name: counter["value"] for name, counter in layout.items()}
        return _pick_figures(values, "")
    figures: dict[str, float | None] = {}
    if get_kind(report) == LAB:
        for row in report["rows"]:
            values = {name: row.get(key) for key, name in _LAB_COSTS.items()}
            if row.get("kind") == "measured":  # a measured row's cycles are derived from its time
                values = {"ms": row["ms"]}
            figures |= _pick_figures(values, f"{_LABS[report['lab']][2].format(**row)} x ")
        return figures
    for row in report["results"]:
        figures |= _pick_figures(row, f"{row['processes']} x ")
    return figures


def read_blocks(report: JsonObject, figure: str) -> list[float]:
    """Return the values of which a figure is the median; empty if it is a single number."""
    processes, _, name = figure.rpartition(" x ")
    rows = report.get("results", ())
    values = next((row for row in rows if str(row["processes"]) == processes), None)
    blocks = values and values.get(f"{name}_repeats")
    return [float(block) for block in blocks] if isinstance(blocks, list) and blocks[1:] else []


def find_figure(name: str) -> Metric | None:
    """Find the catalogue's entry of a figure, with the number of processes or without."""
    return FIGURES.find(name.rpartition(" x ")[2])


def _drop_free_keys(config: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    return {key: value for key, value in config.items() if not key.startswith(_FREE_KEYS)}


def _pick_figures(values: Mapping[str, JsonValue], prefix: str) -> dict[str, float | None]:
    figures = {
        name: value
        for name, value in values.items()
        if FIGURES.find(name) is not None and not isinstance(value, (list, dict))
    }
    return {
        f"{prefix}{name}": float(value) if is_number(value) and math.isfinite(value) else None
        for name, value in figures.items()
    }
