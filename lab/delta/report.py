"""Rows of a report, as a table, as JSON and as a picture of time over tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lab.costing import CompiledCost
from lab.delta.cases import ATTENTION, VARIANTS, LabCase
from lab.delta.errors import Errors
from lab.delta.running import Timing
from utils.errors import UserError
from utils.generations import Generation
from utils.json_types import JsonObject

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Public peaks of bfloat16, TFLOP/s, and GB/s of memory, of GPUs that people rent.
_GPUS = {"H200": (989.0, 4800.0), "H100": (989.0, 3350.0), "A100": (312.0, 2039.0)}
# What each row says, and what those say that did not fail: the table shows it.
_OF_A_CASE = ("variant", "form", "mode")
_OF_A_ROW = {
    *_OF_A_CASE,
    "key_heads",
    "value_heads",
    "batch",
    "tokens",
    "bytes",
    "device",
    "ms",
    "tokens_per_s",
    "tflops",
    "tflops_reported",
    "hlo_lines",
    "compile_s",
    "fallbacks",
}
# In a picture a rule has a colour, a mode a line, and a form with its heads a marker.
_COLORS = {name: f"C{number}" for number, name in enumerate(VARIANTS)} | {ATTENTION: "black"}
_LINES = {"forward": "-", "both": "--"}
_MARKERS = "os^DvP*X<>ph8"
# Rule, form, mode, heads.
_Curve = tuple[str, str, str, str]


def describe_case(case: LabCase, form: str) -> JsonObject:
    """Describe what every row has: the case, its work, its traffic, both conventions."""
    tokens = case.batch * (1 if case.mode == "decode" else case.tokens)
    return {
        **asdict(case),
        "form": form,
        "tokens_of_step": tokens,
        "flops": case.count_flops(),
        "reported_flops": case.count_reported_flops(),
        "bytes": case.count_bytes(),
    }


def describe_timing(case: LabCase, timing: Timing, device: str) -> JsonObject:
    """Describe what ran, but for the case itself."""
    rates = _rate(case, timing.median / 1e3, _find_limits(device))
    return {
        "kind": "measured",
        "device": device,
        "ms": timing.median,
        "ms_low": timing.low,
        "ms_high": timing.high,
        "repeats": timing.repeats,
        "compile_s": timing.first_s,
        "hlo_lines": timing.hlo_lines,
        "fallbacks": timing.fallbacks,
        **rates,
    }


def describe_cost(
    case: LabCase, cost: CompiledCost, generation: Generation, fallbacks: Sequence[str]
) -> JsonObject:
    """Describe what was compiled; milliseconds are bundles with DMA over a derived clock."""
    program = cost.program
    milliseconds = program.with_dma / generation.clock_ghz / 1e6
    limits = generation.peak_tflops, generation.hbm_gb_per_s
    return {
        "kind": "bundles",
        "device": generation.name,
        "ms": milliseconds,
        "mcycles_estimate": program.estimate / 1e6,
        "mcycles_bundles": program.issued / 1e6,
        "mcycles_with_dma": program.with_dma / 1e6,
        "mcycles_matrix": program.sum_of("matrix") / 1e6,
        "mcycles_empty": program.sum_of("empty") / 1e6,
        "mcycles_guessed": program.guessed / 1e6,
        "hbm_bytes": program.hbm_bytes,
        "peak_bytes": cost.peak_bytes,
        "unknown": program.sum_of("unknown"),
        "unseen": program.unseen,
        "compile_s": cost.compile_s,
        "hlo_lines": cost.hlo_lines,
        "fallbacks": dict.fromkeys(fallbacks, 1),
        **_rate(case, milliseconds / 1e3, limits),
    }


def describe_errors(errors: Errors, place: str) -> JsonObject:
    """Describe how far from float64, and on which device."""
    row = {f"error_{name}": value for name, value in asdict(errors).items()}
    return {**{k: v for k, v in row.items() if v is None or not math.isnan(v)}, "error_of": place}


def _rate(case: LabCase, seconds: float, limits: tuple[float, float] | None) -> JsonObject:
    tokens = case.batch * (1 if case.mode == "decode" else case.tokens)
    row: JsonObject = {
        "tokens_per_s": tokens / seconds,
        "tflops": case.count_flops() / seconds / 1e12,
        "tflops_reported": case.count_reported_flops() / seconds / 1e12,
        "gb_per_s": case.count_bytes() / seconds / 1e9,
    }
    if limits:
        floor = max(case.count_flops() / limits[0] / 1e12, case.count_bytes() / limits[1] / 1e9)
        row |= {"floor_ms": 1e3 * floor, "roofline_share": floor / seconds}
    return row


def _find_limits(device: str) -> tuple[float, float] | None:
    if device != "cuda":
        return None
    import torch

    name = torch.cuda.get_device_name()
    return next((limits for key, limits in _GPUS.items() if key in name), None)


def print_rows(rows: Sequence[JsonObject]) -> None:
    """Format a line for each case."""
    print(
        f"{'rule':<14}{'form':<14}{'mode':<9}{'heads':>7}{'B x T':>10}{'on':>6}{'ms':>11}"
        f"{'range':>16}{'Mcyc DMA':>10}{'GB':>7}{'tokens/s':>12}{'TFLOP/s':>9}{'reported':>9}"
        f"{'roofline':>9}{'error':>9}{'HLO':>7}{'comp s':>8}{'host':>5}"
    )
    for row in rows:
        if "failure" in row:
            print(f"{row['variant']:<14}{row['form']:<14}{row['mode']:<9}  {row['failure']}")
        else:
            print(_print_row(row))


def _print_row(row: JsonObject) -> str:
    span = f"{row['ms_low']:.2f}..{row['ms_high']:.2f}" if "ms_low" in row else "bundles"
    heads, sizes = f"{row['key_heads']}/{row['value_heads']}", show_size(row)
    cycles, share = row.get("mcycles_with_dma"), row.get("roofline_share")
    traffic = row.get("hbm_bytes", row["bytes"]) / 1e9
    return (
        f"{row['variant']:<14}{row['form']:<14}{row['mode']:<9}{heads:>7}{sizes:>10}"
        f"{row['device']:>6}{row['ms']:>11.3f}{span:>16}{_show(cycles, '.2f'):>10}{traffic:>7.2f}"
        f"{row['tokens_per_s']:>12,.0f}{row['tflops']:>9.2f}{row['tflops_reported']:>9.2f}"
        f"{_show(share, '.1%'):>9}{row.get('error_output', math.nan):>9.0e}"
        f"{row['hlo_lines'] or 0:>7}{row['compile_s']:>8.1f}{len(row['fallbacks']):>5}"
    )


def show_size(row: JsonObject) -> str:
    """Sequences x tokens of a case; a decoding step has the length of attention's cache alone."""
    has_length = row["mode"] != "decode" or row["variant"] == ATTENTION
    return f"{row['batch']}x{row['tokens'] if has_length else 1}"


def _show(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def find_crossings(rows: Sequence[JsonObject]) -> dict[str, float | None]:
    """Tokens from which a rule takes less time than attention, by `rule mode heads`, or None.

    Between measured lengths both are taken as straight lines on logarithmic axes.
    """
    curves = _collect(rows)
    crossings: dict[str, float | None] = {}
    for (variant, form, mode, heads), curve in curves.items():
        own = curves.get((ATTENTION, form, mode, heads))
        other = own or curves.get((ATTENTION, "xla", mode, heads))
        if variant != ATTENTION and other and len(curve) > 1:
            crossings[f"{variant} {form} {mode} {heads}"] = _cross(curve, other)
    return crossings


def is_drawn(row: JsonObject) -> bool:
    """Return whether a picture shows a row: one sequence, which has a length."""
    return "failure" not in row and row["batch"] == 1 and row["mode"] != "decode"


def _collect(rows: Sequence[JsonObject]) -> dict[_Curve, dict[int, float]]:
    """Milliseconds of one sequence by its tokens."""
    curves: dict[_Curve, dict[int, float]] = {}
    for row in rows:
        if is_drawn(row):
            heads = f"{row['key_heads']}/{row['value_heads']}"
            curve = curves.setdefault((row["variant"], row["form"], row["mode"], heads), {})
            curve[row["tokens"]] = row["ms"]
    return curves


def _cross(curve: dict[int, float], other: dict[int, float]) -> float | None:
    places = sorted(set(curve) & set(other))
    gaps = [math.log(curve[place] / other[place]) for place in places]
    if gaps and gaps[0] <= 0:
        return float(places[0])
    for left, right, before, after in zip(places, places[1:], gaps, gaps[1:], strict=False):
        if after <= 0:
            share = before / (before - after)
            return math.exp(math.log(left) + share * math.log(right / left))
    return None


def draw(rows: Sequence[JsonObject], path: Path) -> None:
    """Time over tokens of single sequences, rules against attention."""
    from matplotlib import pyplot, ticker

    curves, crossings = _collect(rows), find_crossings(rows)
    figure, axes = pyplot.subplots(figsize=(8, 5))
    _draw_curves(axes, curves)
    if crossings and not any(crossings.values()):
        note = "nothing crosses: no rule is below attention at the lengths measured"
        axes.set_title(note, loc="left", fontsize=8)
    for tokens in sorted({crossing for crossing in crossings.values() if crossing}):
        axes.axvline(tokens, color="grey", linewidth=0.5)
        # Curves that cross at one place have a line of the text each.
        text = "\n".join(
            f" {name}: below attention from {tokens:,.0f}"
            for name, crossing in crossings.items()
            if crossing == tokens
        )
        axes.text(
            tokens,
            0.98,
            text,
            transform=axes.get_xaxis_transform(),
            rotation=90,
            fontsize=7,
            va="top",
            ha="right",
        )
    device = next((row["device"] for row in rows if "device" in row), "")
    kind = "bundles with DMA" if any(r.get("kind") == "bundles" for r in rows) else "measured"
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel=f"ms ({kind}, {device})")
    ticks = sorted({tokens for curve in curves.values() for tokens in curve})
    axes.set_xticks(ticks, [f"{tokens:,}" for tokens in ticks])
    axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    axes.yaxis.set_minor_locator(ticker.LogLocator(subs=(2, 5)))
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    if curves:
        axes.legend(fontsize=8, ncols=1 + len(curves) // 20)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_curves(axes: Axes, curves: Mapping[_Curve, Mapping[int, float]]) -> None:
    kinds = sorted({(form, heads) for _, form, _, heads in curves})
    for (variant, form, mode, heads), curve in sorted(curves.items()):
        places = sorted(curve)
        axes.plot(
            places,
            [curve[length] for length in places],
            color=_COLORS.get(variant, "grey"),
            linestyle=_LINES.get(mode, ":"),
            label=f"{variant} {form} {mode} {heads}",
            marker=_MARKERS[kinds.index((form, heads)) % len(_MARKERS)],
        )


def read_rows(paths: Sequence[Path], flag: str = "--earlier") -> list[JsonObject]:
    """Read the rows of reports of this lab, in order.

    Args:
      flag: that named them, for messages.

    Raises:
      UserError: a file is not a report.
    """
    rows: list[JsonObject] = []
    for path in paths:
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{flag} ({path}) cannot be read: {error}") from None
        if not isinstance(report, dict) or report.get("lab") != "delta":
            raise UserError(f"{flag} ({path}) is no report of lab.delta; see --json")
        if not _has_rows(report):
            raise UserError(
                f"{flag} ({path}) lacks rows, or what each of them says; make it anew by --json"
            )
        rows += report["rows"]
    return rows


def _has_rows(report: JsonObject) -> bool:
    """Return whether a row has all that is printed and drawn."""
    rows = report.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return False
    if not all(isinstance(row.get(key), str) for row in rows for key in _OF_A_CASE):
        return False
    return all(row.keys() >= _OF_A_ROW for row in rows if "failure" not in row)
