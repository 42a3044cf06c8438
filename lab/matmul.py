"""What a matrix product's sizes cost, one axis at a time: M rows, K inner length, N columns.

On a device that is here the time of several products is regressed on their number, so that what a
launch takes stands apart from what a product takes. For a TPU that is not here bundles are counted.
Both give the padding law: the size that an axis is rounded up to. tools.shape_advisor takes it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bill.compiler import require_compiler
from bill.targets import Target
from lab.costing import (
    HERE,
    PLACES,
    choose_target,
    compile_program,
    export_in_jax,
    resolve_place,
)
from lab.delta.running import create_fence, open_device
from lab.reports import create_report
from store.quality.trends import prepare_store, save_report
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.programs import (
    CommandLine,
    create_defaults_parser,
    prepare_file,
    prepare_picture,
    require_at_least,
)
from utils.storage.json_files import write_json

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA_VERSION = 1
AXES = ("M", "K", "N")
_COUNTS = (1, 2, 4, 8)
# The least step past a full size; rows are padded to eight, the others to the matrix unit.
_LEAST = 8


def create_parser() -> argparse.ArgumentParser:
    """Create the command line."""
    parser = create_defaults_parser(__doc__, prog="python -m lab.matmul")
    add = parser.add_argument
    add("--on", default="v5e", help=PLACES)
    add("--base", type=int, default=1024, help="size of every axis but the one that varies")
    add(
        "--added",
        type=int,
        nargs="+",
        default=[0, 8, 64, 128, 192, 256, 384, 512],
        help="what the axis that varies has beyond the base; must hold 0 and 8",
    )
    add("--axes", nargs="+", default=list(AXES), choices=AXES, help="axes that vary")
    add("--repeats", type=int, default=5, help="regressions on a device; their median counts")
    add("--time-limit", type=float, default=900.0, help="seconds that a compilation may take")
    add("--json", type=Path, help="write the table and the law here")
    add("--picture", type=Path, help="draw cost over size here")
    add("--store", metavar="DIR", help="keep the report below this run.output_dir, for runs trend")
    return parser


def run(options: argparse.Namespace) -> int:
    """Measure every size and tell the law."""
    options.on = resolve_place(options.on)
    _check(options)
    target = choose_target(options.on)
    prepare_file(options.json, "--json")
    prepare_picture(options.picture, "--picture")
    if options.store:
        prepare_store(options.store, "--store")
    plan = [(axis, added) for axis in options.axes for added in sorted(set(options.added))]
    sizes = [_create_sizes(options.base, *sizes_of_product) for sizes_of_product in plan]
    costs = _time(sizes, options) if target is None else _count(sizes, target, options.time_limit)
    rows = [
        {"axis": axis, "size": options.base + added, "sizes": list(sizes_of_product), **cost}
        for (axis, added), sizes_of_product, cost in zip(plan, sizes, costs, strict=True)
    ]
    report: JsonObject = {
        **create_report("matmul", SCHEMA_VERSION, options, rows),
        "on": options.on,
        "base": options.base,
        "law": find_law(rows, options.base),
    }
    print_table(report)
    if options.json:
        write_json(options.json, report)
    if options.picture:
        draw(report, options.picture)
    if options.store:
        print(f"kept: {save_report(options.store, report)}")
    return 0


def find_law(rows: Sequence[JsonObject], base: int) -> dict[str, int]:
    """Find what each axis is padded to: the size that `base` + 8 costs, less the base.

    By the matrix unit's busy cycles where there are some, else by time, to the nearest eight.
    """
    law = {}
    for axis in dict.fromkeys(row["axis"] for row in rows):
        costs = {
            row["size"]: row.get("kcycles_matrix", row["cost"])
            for row in rows
            if row["axis"] == axis
        }
        padded = base * costs[base + _LEAST] / costs[base] - base
        law[axis] = max(_LEAST, round(padded / _LEAST) * _LEAST)
    return law


def fit_line(counts: Sequence[int], times: Sequence[float]) -> tuple[float, float]:
    """Slope and intercept of the least squares: a product's time, and a launch's."""
    mean_count, mean_time = sum(counts) / len(counts), sum(times) / len(times)
    above = sum((c - mean_count) * (t - mean_time) for c, t in zip(counts, times, strict=True))
    slope = above / sum((c - mean_count) ** 2 for c in counts)
    return slope, mean_time - slope * mean_count


def print_table(report: JsonObject) -> None:
    """Costs by axis, beside how much larger the size is."""
    is_counted = "kcycles_matrix" in report["rows"][0]
    unit = "kcycles, bundles with DMA" if is_counted else "us a product"
    print(f"bfloat16 products on {report['on']}, other axes {report['base']}; cost in {unit}")
    print(f"{'axis':<6}{'size':>6}{'cost':>12}{'cost ratio':>12}{'size ratio':>12}  also")
    for row in report["rows"]:
        first = next(r for r in report["rows"] if r["axis"] == row["axis"])
        also = (
            f"matrix unit {row['kcycles_matrix']:.1f}, bundles {row['kcycles_bundles']:.1f}, "
            f"estimate {row['kcycles_estimate']:.1f}"
            if is_counted
            else f"{row['low']:.1f}..{row['high']:.1f}, launch {row['launch']:.1f}"
        )
        print(
            f"{row['axis']:<6}{row['size']:>6}{row['cost']:>12.1f}"
            f"{row['cost'] / first['cost']:>12.3f}{row['size'] / report['base']:>12.3f}  {also}"
        )
    law = ", ".join(f"{axis} to {step}" for axis, step in report["law"].items())
    print(f"the law: {law}")


def draw(report: JsonObject, path: Path) -> None:
    """Cost over size for each axis, relative to the base."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for axis in report["law"]:
        rows = [row for row in report["rows"] if row["axis"] == axis]
        costs = [row.get("kcycles_matrix", row["cost"]) for row in rows]
        axes.plot(
            [row["size"] for row in rows],
            [size / costs[0] for size in costs],
            marker="o",
            label=f"{axis}: padded to {report['law'][axis]}",
        )
    sizes = sorted({row["size"] for row in report["rows"]})
    axes.plot(sizes, [size / report["base"] for size in sizes], "k--", label="in proportion")
    what = "matrix unit's cycles" if "kcycles_matrix" in report["rows"][0] else "time"
    axes.set(xlabel="size of the axis", ylabel=f"{what}, of {report['base']}", title=report["on"])
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _check(options: argparse.Namespace) -> None:
    if not {0, _LEAST} <= set(options.added):
        raise UserError(f"--added must hold 0 and {_LEAST}, which the law is read from; add them")
    require_at_least(1, options, "base", "repeats", "time_limit")
    if options.base + min(options.added) < 1:
        raise UserError(
            f"--added ({min(options.added)}) leaves nothing of --base ({options.base}); raise it"
        )
    if options.base % 256 and options.on not in HERE:
        raise UserError(f"--base ({options.base}) must be a multiple of 256, a full matrix unit")


def _create_sizes(base: int, axis: str, added: int) -> tuple[int, int, int]:
    rows, inner, columns = (base + (added if name == axis else 0) for name in AXES)
    return rows, inner, columns


def _count(
    sizes: Sequence[tuple[int, int, int]], target: Target, time_limit_s: float
) -> list[JsonObject]:
    """Bundles of each product."""
    require_compiler()
    programs = [{"form": "product", "sizes": list(shape)} for shape in sizes]
    costs = []
    for artifact in export_in_jax(programs, target, time_limit_s=time_limit_s):
        program = compile_program(artifact, target, time_limit_s=time_limit_s).program
        costs.append(
            {
                "kind": "bundles",
                "mcycles_with_dma": program.with_dma / 1e6,
                "cost": program.with_dma / 1e3,
                "kcycles_bundles": program.issued / 1e3,
                "kcycles_matrix": program.sum_of("matrix") / 1e3,
                "kcycles_estimate": program.estimate / 1e3,
                "hbm_bytes": program.hbm_bytes,
            }
        )
        sys.stderr.write(f"compiled {len(costs)} of {len(sizes)}\n")
    return costs


def _time(sizes: Sequence[tuple[int, int, int]], options: argparse.Namespace) -> list[JsonObject]:
    """Microseconds of each product on a device that is here."""
    import torch

    device = open_device(options.on)
    fence = create_fence(device)
    times = []
    for rows, inner, columns in sizes:
        right = torch.randn(inner, columns, dtype=torch.bfloat16).to(device)
        lefts = [
            torch.randn(rows, inner, dtype=torch.bfloat16).to(device) for _ in range(max(_COUNTS))
        ]
        fence()

        for count in _COUNTS:
            _measure(lefts[:count], right, fence)
        lines = [
            fit_line(_COUNTS, [_measure(lefts[:count], right, fence) for count in _COUNTS])
            for _ in range(options.repeats)
        ]
        slopes = sorted(slope for slope, _ in lines)
        launches = sorted(launch for _, launch in lines)
        middle = len(slopes) // 2
        times.append(
            {
                "kind": "measured",
                "ms": slopes[middle] / 1e3,
                "cost": slopes[middle],
                "low": slopes[0],
                "high": slopes[-1],
                "launch": launches[middle],
            }
        )
    return times


def _measure(lefts: list[Tensor], right: Tensor, fence: Callable[[], None]) -> float:
    """Microseconds of so many products, each of its own left side, so that none is left out."""
    began = time.perf_counter()
    products = [left @ right for left in lefts]
    fence()
    passed = time.perf_counter() - began
    del products
    return 1e6 * passed


main = CommandLine(create_parser, run)

if __name__ == "__main__":
    sys.exit(main())
