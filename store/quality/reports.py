"""Reports of `tools.benchmark` and `lab.delta` and verdicts of `tools.compile_for_tpu`: their
figures, and what must be equal for two of them to be comparable.

Versions of the software are no part of that: whether a newer compiler makes a step slower is what
is asked.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from store.query.config_text import flatten_run_config
from store.record.catalogue import Catalogue, Metric
from utils.errors import UserError
from utils.json_types import JsonObject, JsonValue

Kind = Literal["benchmark", "verdict", "lab"]
BENCHMARK, VERDICT, LAB = "benchmark", "verdict", "lab"
# Where a run writes, and which of several measurements of one report it was.
_FREE_KEYS = ("run.", "runtime.num_processes")
_SHARED = ("hardware", "devices", "global_batch_size", "unit")
_STEP = ("target", "chips", "examples_per_chip")
_REPEATS = "_repeats"
# Of the lab of delta rules: what all rows share, what tells one from another, and its figures.
_LAB_SETTINGS = ("on", "width", "chunk", "solver", "loop", "precision")
_LAB_ROW = "{variant} {form} {mode} {key_heads}/{value_heads} {batch}x{tokens}"
_LAB_COSTS = {
    "mcycles_with_dma": "bundles_mcycles", "mcycles_estimate": "estimated_mcycles",
    "hbm_bytes": "hbm_bytes", "peak_bytes": "peak_bytes",
}  # fmt: skip
# Figures of a verdict; how long it was compiled tells of the host.
_ESTIMATES = (
    "estimated_mcycles", "bundles_mcycles", "hbm_bytes", "collective_bytes", "max_batch_per_chip",
)  # fmt: skip

FIGURES = Catalogue(
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
    Metric("faults", "", "lower", "deterministic", "known faults found in a program"),
)  # fmt: skip
# What flips on small edits of a program, as a share: less than this is no difference.
COMPILER_NOISE = 0.05


def read_report(path: Path, flag: str) -> JsonObject:
    """A report or verdict from a file.

    Raises:
      UserError: it is not there, or neither of the two; names the flag.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"{flag} {path} cannot be read: {reason}; give a --json file of tools.benchmark or "
            "tools.compile_for_tpu"
        ) from error
    try:
        get_kind(report)
        get_conditions(report)
        read_figures(report)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(
            f"{flag} {path} is no report of tools.benchmark and no verdict of "
            f"tools.compile_for_tpu ({error}); give one of their --json files"
        ) from error
    return report


def get_kind(report: JsonObject) -> Kind:
    """Which of the two it is.

    Raises:
      ValueError: neither, or of a form that nobody reads.
    """
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
    if report.get("lab") == "delta" and version == 2 and report["rows"]:
        return LAB
    raise ValueError(f"its form is {version!r}")


def get_conditions(report: JsonObject) -> dict[str, JsonValue]:
    """All that two reports must have in common to be compared, by the names that users know.

    Figures of different numbers of processes stand apart: `2 x hardware`.
    """
    if get_kind(report) == VERDICT:
        return {name: report[name] for name in _STEP}
    if get_kind(report) == LAB:
        shared = {f"--{name}": report["settings"][name] for name in _LAB_SETTINGS}
        return {**shared, "rows": [_LAB_ROW.format(**row) for row in report["rows"]]}
    found = get_settings(report["config"], report["settings"]["input"])
    for one in report["results"]:
        found |= {f"{one['processes']} x {name}": one.get(name) for name in _SHARED}
    return found


def read_config(report: JsonObject) -> dict[str, JsonValue]:
    """Dotted key -> value of the configuration that was measured or compiled; empty: not told.

    Of the lab its flags.
    """
    if get_kind(report) == LAB:
        return dict(report["settings"])
    told = report.get("configuration" if get_kind(report) == VERDICT else "config")
    return flatten_run_config(told) if isinstance(told, dict) else {}


def get_settings(config: JsonObject, source: str) -> dict[str, JsonValue]:
    """Conditions of a benchmark that are known before anything is measured.

    Args:
      config: the configuration, by sections.
      source: `--input`.
    """
    flat = flatten_run_config(config)
    found = {key: value for key, value in flat.items() if not key.startswith(_FREE_KEYS)}
    return {**found, "--input": source}


def get_identity(report: JsonObject) -> str:
    """A hash of all that reports of one series have in common.

    Of a verdict that is more than `--compare` asks for: its whole configuration, and the shapes.

    Raises:
      UserError: it does not tell.
    """
    if get_kind(report) == VERDICT:
        told = report.get("configuration")
        if not told:
            raise UserError(
                "this verdict does not say its configuration (schema_version "
                f"{report['schema_version']}); compile it again"
            )
        results: JsonValue = {name: report[name] for name in (*_STEP, "unit", "example")}
        config, source = flatten_run_config(told), VERDICT
    elif get_kind(report) == LAB:
        config, source, results = {}, LAB, get_conditions(report)
    else:
        results = [
            {name: one.get(name) for name in ("processes", *_SHARED)} for one in report["results"]
        ]
        config, source = flatten_run_config(report["config"]), report["settings"]["input"]
    kept = {key: value for key, value in config.items() if not key.startswith(_FREE_KEYS)}
    text = json.dumps([kept, source, results], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def name_report(report: JsonObject) -> str:
    """`<time>-<commit>`: later ones come later in the order of names."""
    if get_kind(report) == VERDICT:
        return f"{report['made'].replace(' ', 'T')}-{report.get('git_commit') or 'unknown'}"
    return f"{report['created']}-{report['environment']['git_commit'] or 'unknown'}"


def describe_report(report: JsonObject) -> str:
    """What was measured or compiled, in a few words."""
    if get_kind(report) == VERDICT:
        return f"{report['model']} for {report['target']}, {report['examples_per_chip']} a device"
    if get_kind(report) == LAB:
        rules = ", ".join(dict.fromkeys(row["variant"] for row in report["rows"]))
        return f"lab of delta rules on {report['settings']['on']}: {rules}"
    first = report["results"][0]
    model = report["config"].get("model", {}).get("name", "?")
    # Few devices have a name of their own; all are of a kind.
    hardware = first.get("hardware") or report["environment"].get("device") or "unnamed hardware"
    return f"{model} on {hardware}, batch {first.get('global_batch_size')}"


def get_versions(report: JsonObject) -> dict[str, str]:
    """The versions of what it was made with."""
    if get_kind(report) == VERDICT:
        return report.get("versions", {})
    return report["environment"].get("packages", {})


def read_figures(report: JsonObject) -> dict[str, float | None]:
    """Figure -> value; none: it was not measured, or is not finite.

    Those of a benchmark have the number of processes in front: `2 x img_per_s`; those of the lab
    their row: `gdn xla forward 16/32 1x8192 x bundles_mcycles`.
    """
    if get_kind(report) == VERDICT:
        told = {name: report.get(name) for name in _ESTIMATES}
        told["peak_bytes"] = report["memory"]["peak_bytes"]
        told["faults"] = len(report.get("faults") or ())
        return _pick(told, "")
    found: dict[str, float | None] = {}
    if get_kind(report) == LAB:
        for row in report["rows"]:
            found |= _pick(_list_costs(row), f"{_LAB_ROW.format(**row)} x ")
        return found
    for one in report["results"]:
        found |= _pick(one, f"{one['processes']} x ")
    return found


def _list_costs(row: JsonObject) -> JsonObject:
    """What a row of the lab was measured or counted by; milliseconds of cycles are derived."""
    if row.get("kind") == "measured":
        return {"ms": row["ms"]}
    return {name: row.get(told) for told, name in _LAB_COSTS.items()}


def read_blocks(report: JsonObject, figure: str) -> list[float]:
    """What a figure is the median of; empty: it is a single number."""
    processes, _, name = figure.rpartition(" x ")
    results = report.get("results", ())
    one = next((one for one in results if str(one["processes"]) == processes), {})
    told = one.get(f"{name}{_REPEATS}")
    return [float(value) for value in told] if isinstance(told, list) and len(told) > 1 else []


def find_figure(name: str) -> Metric | None:
    """The catalogue's entry of a figure, with the number of processes or without."""
    return FIGURES.find(name.rpartition(" x ")[2])


def _pick(values: Mapping[str, JsonValue], prefix: str) -> dict[str, float | None]:
    return {
        f"{prefix}{name}": _to_number(value)
        for name, value in values.items()
        if FIGURES.find(name) is not None and not isinstance(value, list | dict)
    }


def _to_number(value: JsonValue) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None
