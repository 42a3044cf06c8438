"""A report as a person reads it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bill.schema import BundleReport, Interval, Report

_GIB = 2**30
_SHOWN_BUFFERS = 5
_SHOWN_ROWS = 12


def print_report(report: Report) -> None:
    """Verdict, figures, costs and faults."""
    shapes = ", ".join(f"{name} {sizes}" for name, sizes in report.example.items() if sizes)
    print(
        f"{report.model} on {report.target} ({report.device}), {report.chips} device(s), "
        f"{report.examples_per_chip} examples each: {shapes}"
    )
    print(f"note: {report.note}")
    _print_memory(report)
    if report.estimated_mcycles is None:
        return
    _print_cost(report)
    if report.bundles is not None:
        print_bundles(report.bundles)
    print("\nestimate by role:" if report.bundles else "\ncost by role:")
    for group in report.groups:
        print(f"  {group.mcycles:9.3f} Mcyc  {100 * group.share:5.1f} %  {group.role}")
    print("\nmost expensive operations:")
    for cost in report.top:
        where = " ".join(word for word in (cost.owner, cost.module) if word) or "-"
        phase = "back" if cost.phase == "backward" else ""
        print(
            f"  {cost.mcycles:9.3f} Mcyc  {where:<40.40} {phase:<4} {cost.operation:<26.26} "
            f"{cost.result}"
        )
    print("\nknown faults:" if report.faults else "\nknown faults: none found")
    for fault in report.faults:
        cycles = "" if fault.mcycles is None else f", {fault.mcycles:.3f} Mcyc"
        print(f"  {fault.kind}: {fault.count}{cycles}; {fault.text}")
    if report.layout is not None:
        print("\nlayout:")
        for name, counter in report.layout:
            where = f"; first at {counter.first}" if counter.first else ""
            print(f"  {name.replace('_', ' ')}: {counter.value:g}{where}")
    versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    print(f"\n{report.made}, {versions}, graph {report.graph}")


def _print_memory(report: Report) -> None:
    memory = report.memory
    verdict = "fits" if report.fits else "DOES NOT FIT"
    print(
        f"\n{verdict}: {memory.peak_bytes / _GIB:.2f} GiB of {memory.usable_bytes / _GIB:.2f} GiB "
        "usable HBM"
    )
    if memory.argument_bytes is not None:
        parts = ("argument", "output", "temp", "alias")
        sizes = (getattr(memory, f"{part}_bytes") / _GIB for part in parts)
        text = ", ".join(f"{part} {size:.3f}" for part, size in zip(parts, sizes, strict=True))
        print(f"  {text} GiB")
    for buffer in memory.largest[:_SHOWN_BUFFERS]:
        shape = f"{buffer.dtype}{buffer.shape}"
        print(f"  {buffer.bytes / 2**20:9.1f} MiB  {buffer.kind:<9} {shape:<28} {buffer.name}")
    if report.max_batch_per_chip is not None:
        large = report.too_large_batch_per_chip
        next_one = "no limit found" if large is None else f"{large} does not fit"
        print(f"  largest batch of a device that fits: {report.max_batch_per_chip} ({next_one})")


def _print_cost(report: Report) -> None:
    step, rate, mfu = report.step_ms, report.units_per_s, report.mfu
    flops, traffic = report.flops, report.hbm_bytes
    assert step and rate and mfu and flops is not None and traffic is not None  # where it fits
    print(
        f"\nestimated {report.estimated_mcycles:.2f} Mcyc; {flops / 1e12:.3f} TFLOP, "
        f"{traffic / 1e9:.2f} GB of HBM traffic"
    )
    if step.bundles is None:
        print(
            f"  step {step.lower:.1f} ms (bound) to {step.estimate:.1f} ms (estimate); "
            f"{report.unit}/s a device {rate.estimate:.0f} (estimate) to {rate.lower:.0f}; "
            f"MFU {100 * mfu.estimate:.0f} to {100 * mfu.lower:.0f} %"
        )
    else:
        print(f"  step {order(step, '.1f', 'ms')}")
        print(f"  {report.unit}/s a device: {order(rate, '.0f', '')}")
        print(f"  share of the peak: {order(mfu, '.0%', '')}")
    for group in report.collectives:
        print(
            f"  {group.kind} of {group.dtype}: {group.bytes / 1e6:.2f} MB in {group.count} "
            "operands, no estimate"
        )
    if report.uncosted or report.scalar_kernels:
        kinds = ", ".join(
            f"{group.count} {group.opcode} ({group.bytes / 1e6:.0f} MB)"
            for group in report.uncosted
        )
        lack = "neither estimate nor bundles" if report.bundles else "without an estimate"
        print(f"  {lack}: {kinds or 'none'}; {report.scalar_kernels} on single numbers")


def order(one: Interval, form: str, unit: str) -> str:
    """Bound, bundles and estimate with the signs that hold between them."""
    assert one.bundles is not None
    values = (one.lower, one.bundles, one.estimate)
    names = ("bound", "bundles with DMA", "estimate")
    texts = [
        f"{value:{form}} {unit}".rstrip() + f" ({name})"
        for value, name in zip(values, names, strict=True)
    ]
    signs = ["<=" if left <= right else ">=" for left, right in itertools.pairwise(values)]
    return f"{texts[0]} {signs[0]} {texts[1]} {signs[1]} {texts[2]}"


def print_bundles(found: BundleReport) -> None:
    """Cycles by bundles, beside the estimate."""
    print(
        f"\nbundles: {found.issued_mcycles:.2f} Mcyc issued, {found.empty_mcycles:.2f} of them "
        f"empty; matrix unit busy {found.matrix_mcycles:.2f}; with DMA "
        f"{found.with_dma_mcycles:.2f}; {found.dma_bytes / 1e9:.2f} GB by operations, "
        f"{found.async_bytes / 1e9:.2f} GB beside them"
    )
    print(f"  model: {found.model}")
    sources = ", ".join(f"{count} by {name}" for name, count in sorted(found.sources.items()))
    print(
        f"  operations: {sources}; {found.guessed_mcycles:.2f} Mcyc are estimates in place of a "
        f"listing, {found.unestimated_mcycles:.2f} of bundles have no estimate; {found.unknown} "
        "decisions depend on data"
    )
    for title, rows in (
        ("role", found.roles),
        ("module", found.modules),
        ("operation", found.operations),
    ):
        print(
            f"\n  {'issued':>9} {'empty':>8} {'matrix':>8} {'waits':>8} {'estimate':>9} "
            f"{'DMA, MB':>9}  by {title}"
        )
        for row in rows[:_SHOWN_ROWS]:
            print(
                f"  {row.issued_mcycles:9.3f} {row.empty_mcycles:8.3f} {row.matrix_mcycles:8.3f} "
                f"{row.waited_mcycles:8.3f} {row.estimated_mcycles:9.3f} "
                f"{row.dma_bytes / 1e6:9.1f}  {row.name}"
                + (f" x {row.runs}" if row.source and row.runs > 1 else "")
            )
