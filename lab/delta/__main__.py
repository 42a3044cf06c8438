"""Times the rules of delta attention on a device, or counts their cycles on a TPU that is not here.

Each form is held against the recurrence in float64, gradients included, before any time is taken.
On cpu, cuda and xla times are measured; for a TPU that is not here they are bundles with DMA over a
derived clock, which are no measurements. Full attention stands beside the rules.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bill.compiler import require_compiler
from bill.targets import Target
from lab.costing import PLACES, choose_target, resolve_place
from lab.delta import compiling
from lab.delta.cases import MODES, TYPES, VARIANTS, LabCase, check_case
from lab.delta.errors import check_program, shrink
from lab.delta.gaps import FORMS, PACKAGES, leave_out
from lab.delta.report import (
    describe_case,
    describe_cost,
    describe_errors,
    describe_timing,
    draw,
    find_crossings,
    is_drawn,
    print_rows,
    read_rows,
    show_size,
)
from lab.delta.running import open_device, time_program
from lab.reports import create_report
from models.delta.rules.layout import CoreOptions
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
    from models.delta.rules.layout import CoreOptions

SCHEMA_VERSION = 2
HEADS = ("16/16", "16/32", "16/48", "16/64", "24/24")
SIZES = ("1x2048", "1x8192", "1x32768", "8x4096", "4x2048")
DECODE_BATCHES = (1, 32, 256, 1024)
# Keys and values that a decoding step of attention reads.
_SEEN = 8192


def create_parser() -> argparse.ArgumentParser:
    """Create the command line."""
    parser = create_defaults_parser(__doc__, prog="python -m lab.delta")
    add = parser.add_argument
    add("--on", default="cpu", help=PLACES)
    add(
        "--form",
        nargs="+",
        default=["xla"],
        choices=FORMS,
        help="the project's own, with XLA's loops or Pallas kernels; the same in JAX (compiled for "
        "TPUs alone); or a package's kernels (on cuda)",
    )
    add("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS, help="rules")
    add("--modes", nargs="+", default=list(MODES), choices=MODES, help="both: with gradients")
    add("--heads", nargs="+", default=list(HEADS), help="of q and k / of v")
    add("--sizes", nargs="+", default=list(SIZES), help="sequences x tokens")
    add("--decode-batches", nargs="+", type=int, default=list(DECODE_BATCHES), help="sequences")
    add("--width", type=int, default=128, help="of keys and values")
    add("--chunk", type=int, default=64, help="tokens of a chunk")
    add("--solver", default="auto", help="auto, triangular_solve, ladder16 or rows")
    add(
        "--loop",
        default="auto",
        choices=("auto", "scan", "blocks", "unrolled"),
        help="over chunks, or attention's queries; auto: as models have it",
    )
    add("--products", default="auto", help="of matrices: auto, bfloat16, bfloat16x3 or bfloat16x6")
    add(
        "--precision",
        default="default",
        choices=("default", "high", "highest"),
        help="of float32 products on a TPU: 1, 3 or 6 passes of bfloat16",
    )
    add(
        "--types",
        default="bfloat16",
        choices=tuple(TYPES),
        help="of inputs on a TPU that is compiled for; layers: q and k of rules in float32, as "
        "models hand them on",
    )
    add("--repeats", type=int, default=5, help="executions that count, behind two that do not")
    add("--time-limit", type=float, default=900.0, help="seconds that a compilation may take")
    add("--json", type=Path, help="write the report here")
    add(
        "--earlier",
        nargs="+",
        type=Path,
        default=[],
        metavar="JSON",
        help="reports whose rows stand before these, for one table and picture of many runs",
    )
    add("--picture", type=Path, help="draw time over tokens here")
    add("--store", metavar="DIR", help="keep the report below this run.output_dir, for runs trend")
    return parser


def run(options: argparse.Namespace) -> int:
    """Measure the cases that the flags name; 1 where one of them failed."""
    options.on = resolve_place(options.on)
    target = choose_target(options.on)
    if target is not None:
        # Values are compared on the host.
        os.environ.setdefault("PJRT_DEVICE", "CPU")
    _check(options, target)
    cases, gaps = leave_out(list(list_cases(options)))
    rows = read_rows(options.earlier)
    planned = [describe_case(*planned_case) for planned_case in cases]
    if options.picture and not any(map(is_drawn, [*planned, *rows])):
        raise UserError(
            f"--picture ({str(options.picture)!r}) shows single sequences, and none is asked for; "
            "give --modes forward or both with --sizes 1xTOKENS, or leave it out"
        )
    if gaps:
        sys.stderr.write(f"{gaps}\n")
    for (case, form), row in zip(cases, planned, strict=True):
        sys.stderr.write(f"{case.variant} {form} {case.mode} {show_size(row)}\n")
        try:
            row |= _measure(case, form, options, target)
        except (UserError, RuntimeError) as error:
            row["failure"] = str(error).partition("\n")[0][:300]
        rows.append(row)
        if options.json:
            # A grid takes hours: what is found so far is not lost with the rest.
            write_json(options.json, _create_report(options, rows))
    print_rows(rows)
    report = _create_report(options, rows)
    for name, tokens in report["crossings"].items():
        where = "nowhere measured" if tokens is None else f"from {tokens:,.0f} tokens"
        print(f"{name}: faster than attention {where}")
    _keep(options, report)
    return int(any("failure" in row for row in rows))


def list_cases(options: argparse.Namespace) -> Iterator[tuple[LabCase, str]]:
    """List every case of the grid and its form."""
    for heads, variant, mode in itertools.product(options.heads, options.variants, options.modes):
        keys, values = _read_pair(heads, "/", "--heads")
        sizes = [_read_pair(text, "x", "--sizes") for text in options.sizes]
        if mode == "decode":
            sizes = [(batch, _SEEN) for batch in options.decode_batches]
        for batch, tokens in sizes:
            case = LabCase(variant, mode, keys, values, batch, tokens, options.width, options.chunk)
            check_case(case)
            yield from ((case, form) for form in options.form)


def _check(options: argparse.Namespace, target: Target | None) -> None:
    """Refuse what cannot be measured, before anything is.

    Raises:
      UserError: names the flag.
    """
    require_at_least(1, options, "repeats", "width", "time_limit")
    if min(options.decode_batches) < 1:
        raise UserError(f"--decode-batches ({min(options.decode_batches)}) must be at least 1")
    if "jax_reference" in options.form and target is None:
        raise UserError("--form jax_reference is compiled for TPUs alone; give --on v5e or v6e")
    if options.types != "bfloat16" and (target is None or "jax_reference" in options.form):
        raise UserError(
            f"--types {options.types} is for the project's own forms, compiled for TPUs; leave it "
            "out, or give --on v5e and --form xla or pallas"
        )
    if "pallas" in options.form and options.on in ("cpu", "cuda"):
        raise UserError(f"--form pallas runs on XLA, not on {options.on}; give --on xla or v5e")
    for form in options.form:
        if form in PACKAGES and options.on != "cuda":
            raise UserError(
                f"--form {form} runs on NVIDIA GPUs, not on {options.on}; give --on cuda"
            )
        _create_options(options, form)
    leave_out(list(list_cases(options)))
    if target is None:
        open_device(options.on)
    else:
        require_compiler()
    prepare_file(options.json, "--json")
    prepare_picture(options.picture, "--picture")
    if options.store:
        prepare_store(options.store, "--store")


def _measure(
    case: LabCase, form: str, options: argparse.Namespace, target: Target | None
) -> JsonObject:
    """Errors first, then time or cycles."""
    import torch

    core = _create_options(options, form)
    if target is None:
        device = open_device(options.on)
        errors = check_program(shrink(case), core, device)
        timing = time_program(case, core, device, repeats=options.repeats)
        figures = describe_timing(case, timing, device.type)
        return figures | describe_errors(errors, device.type)
    limit = options.time_limit
    if form == "jax_reference":
        errors = compiling.check_in_jax(shrink(case), target, time_limit_s=limit)
        cost = compiling.compile_in_jax(case, target, time_limit_s=limit)
        fallbacks: list[str] = []
    else:
        core = compiling.resolve_loop(case, core)
        # Kernels are interpreted by XLA alone, and it alone has a loop.
        is_there = form == "pallas" or core.loop == "blocks"
        place = open_device("xla") if is_there else torch.device("cpu")
        errors = check_program(shrink(case), core, place)
        cost, fallbacks = compiling.compile_in_torch(
            case,
            core,
            target,
            precision=options.precision,
            types=options.types,
            time_limit_s=limit,
        )
    figures = describe_cost(case, cost, target.generation, fallbacks)
    return figures | describe_errors(errors, "cpu")


def _create_options(options: argparse.Namespace, form: str) -> CoreOptions:
    if form == "pallas" and options.products != "auto":
        raise UserError(
            f"--form pallas multiplies by parts of its own, and --products ({options.products}) "
            "asks for others; leave one of them out"
        )
    try:
        return CoreOptions(
            options.chunk,
            options.solver,
            options.loop,
            products=options.products,
            kernels="pallas" if form == "pallas" else "xla",
            backend=form if form in PACKAGES else "own",
        )
    except UserError as error:
        place = f"--form {form}: " if form in PACKAGES else "--"
        raise UserError(f"{place}{error}") from None


def _read_pair(text: str, mark: str, flag: str) -> tuple[int, int]:
    words = text.split(mark)
    if len(words) != 2 or not all(word.isdecimal() and int(word) for word in words):
        raise UserError(f"{flag} ({text!r}) must be two numbers of 1 or more, such as 16{mark}32")
    return int(words[0]), int(words[1])


def _create_report(options: argparse.Namespace, rows: list[JsonObject]) -> JsonObject:
    report = create_report("delta", SCHEMA_VERSION, options, rows)
    return {**report, "crossings": find_crossings(rows)}


def _keep(options: argparse.Namespace, report: JsonObject) -> None:
    if options.json:
        write_json(options.json, report)
    if options.picture:
        draw(report["rows"], options.picture)
    if options.store:
        print(f"kept: {save_report(options.store, report)}")


main = CommandLine(create_parser, run)

if __name__ == "__main__":
    sys.exit(main())
