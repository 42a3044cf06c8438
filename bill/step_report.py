"""Traces and compiles a step and reports what it costs: the work of `bill.compile_for_tpu`."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from bill import analysis, compiler
from bill.bundle_report import count_step, create_bundle_report
from bill.bundles.counting import is_copy_beside
from bill.hlo import get_hbm_bytes
from bill.layout import count_layout
from bill.printing import print_report
from bill.published import describe_calibration
from bill.schema import SCHEMA_VERSION, Report
from bill.step import micro_batches as splitting
from bill.step import tracing
from bill.step.batch_search import BatchSearch
from bill.step.derive import find_stack
from bill.step.tracing import StepExport
from bill.targets import COMPILERS, NEWEST, Target, parse_target
from job.micro_batches import choose_parts, compute_step_hash, get_examples_per_chip
from store.quality.gates import EXIT_UNDECIDED, Gate, check_samples, get_code
from store.quality.report_comparison import check_report_flags, evaluate_report, read_base
from store.quality.report_gates import DEFAULT_PCT, check_comparable
from store.record.environment import read_environment
from utils.config.load import change, load_config
from utils.errors import EXIT_FAILED, UserError
from utils.generations import LAUNCHED
from utils.programs import get_run_flags, prepare_file, prepare_folder, require_at_least

if TYPE_CHECKING:
    from bill.compiled import Compiled
    from bill.hlo import Instruction
    from utils.config.load import RunConfig
    from utils.json_types import JsonObject

NOTE = (
    f"compiler's estimate, not a measurement; {describe_calibration()}. Collectives, input and "
    "dispatch are not in it"
)
_BATCH_STEP = 8
# Of two exit codes the later one here counts: passed, undecided, failed.
_SEVERITY = (0, EXIT_UNDECIDED, EXIT_FAILED)


@dataclass(frozen=True)
class Compilation:
    """One program to compile.

    Args:
      config: the run's, with its flags.
      chips: devices that the step is partitioned over; 1: not at all.
      batch: examples of a step on each device.
      is_automatic: a verdict tells the run how many micro-batches it has, where it may.
    """

    config: RunConfig
    target: Target
    chips: int
    batch: int
    is_automatic: bool = False


def run(options: argparse.Namespace) -> int:
    """Compile what the flags say; the exit code tells a regression."""
    require_at_least(1, options, "time_limit", "num_classes")
    config = load_config(get_run_flags(options))
    if options.chips < 1:
        raise UserError(f"--chips ({options.chips}) must be at least 1")
    is_newest = options.compiler == NEWEST or find_stack(config) == "tpu"
    target = parse_target(options.target, options.chips, compiler=COMPILERS[is_newest])
    if options.chips > 1 and find_stack(config) == "tpu":
        raise UserError(
            f"--chips ({options.chips}) is not supported with runtime.device=tpu, which has no "
            "mesh; leave --chips out"
        )
    prepare_file(options.json, "--json")
    prepare_folder(options.hlo, "--hlo")
    batch = _choose_batch(options, config, target)
    is_automatic = options.write or config.train.accumulate_steps == "auto"
    compilation = Compilation(config, target, options.chips, batch, is_automatic)
    _check_search(options, compilation)
    check_report_flags(options)
    if options.limit is not None and not 0 < options.limit < math.inf:
        raise UserError(f"--limit ({options.limit}) must be above 0; give Mcycles of a step")
    base = read_base(options)
    if base is not None:
        check_comparable(base, describe_step(compilation))
    compiler.require_compiler(target.compiler)
    if options.micro_batches:
        report = find_micro_batches(compilation, options)
    else:
        report = create_report(resolve_parts(compilation), options)
    if options.max_batch:
        find_max_batch(compilation, options, report)
    print_report(report)
    _write(report, options.json)
    code, report.comparison = evaluate_report(
        options, base, report.model_dump(mode="json"), max_pct=DEFAULT_PCT
    )
    if report.comparison:
        _write(report, options.json)
    return max(code, _check_limit(report, options.limit), key=_SEVERITY.index)


def create_report(compilation: Compilation, options: argparse.Namespace) -> Report:
    """Trace and compile one program and read what it costs."""
    export, compiled = trace_and_compile(compilation, options)
    if options.hlo:
        (options.hlo / "program.hlo").write_text(compiled.hlo, encoding="utf-8")
        (options.hlo / "step.stablehlo").write_bytes(export.bytecode)
    return describe(compilation, export, compiled, str(options.config), options.rest)


def trace_and_compile(
    compilation: Compilation, options: argparse.Namespace
) -> tuple[StepExport, Compiled]:
    """Trace and compile the step, and report it."""
    name, batch = compilation.config.model.name, compilation.batch
    _log(f"tracing the step of {name}, {batch} examples a device")
    given, chips = _read_sizes(options), compilation.chips
    export = tracing.trace_alone(
        compilation.config,
        batch=batch,
        devices=chips,
        given=given,
        chip=compilation.target.generation.name,
        is_automatic=compilation.is_automatic,
    )
    _log(f"compiling for {compilation.target.name}, {compilation.chips} device(s)")
    compiled = compiler.compile_step(
        export,
        compilation.target,
        devices=compilation.chips,
        store=options.cache_dir or compiler.get_default_store(),
        time_limit_s=options.time_limit,
        with_bundles=options.bundles or options.micro_batches,
    )
    _log("found in the store" if compiled.cached else "compiled")
    return export, compiled


def describe(
    compilation: Compilation, export: StepExport, compiled: Compiled, name: str, flags: list[str]
) -> Report:
    """Compute all figures of a compiled step."""
    instructions = analysis.read_instructions(compiled)
    memory = analysis.get_memory(compiled, export, compilation.target, instructions)
    report = Report(
        note=NOTE,
        config=name,
        flags=flags,
        model=compilation.config.model.name,
        target=compilation.target.name,
        device=compiled.facts.device_kind or compilation.target.generation.name,
        chips=compilation.chips,
        examples_per_chip=compilation.batch,
        unit=export.unit[0],
        example=export.shapes,
        fits=compiled.needed_bytes is None and memory.peak_bytes <= memory.usable_bytes,
        memory=memory,
        graph=compiled.key,
        versions={**compiler.require_compiler(compilation.target.compiler), **export.versions},
        made=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        git_commit=read_environment()["git_commit"],
        configuration=compilation.config.model_dump(mode="json"),
    )
    if compiled.needed_bytes is not None:
        return report
    flops, mcycles = compiled.facts.flops, analysis.sum_mcycles(instructions)
    hbm_bytes = get_hbm_bytes(instructions)
    report.estimated_mcycles, report.flops, report.hbm_bytes = round(mcycles, 4), flops, hbm_bytes
    counted = _add_bundles(report, compilation, compiled, instructions)
    bundles = report.bundles
    upper = mcycles + (bundles.unestimated_mcycles if bundles else 0)
    report.step_ms, report.units_per_s, report.mfu = analysis.get_bounds(
        flops,
        hbm_bytes,
        (report.bundles_mcycles, upper),
        compilation.target,
        compilation.batch * export.unit[1],
    )
    report.collectives = analysis.list_collectives(instructions)
    report.collective_bytes = sum(group.bytes for group in report.collectives)
    report.uncosted, report.scalar_kernels = analysis.list_uncosted(instructions, counted)
    report.groups, report.top = analysis.list_groups(instructions), analysis.list_top(instructions)
    is_bf16 = compilation.config.runtime.precision == "bf16"
    report.faults = analysis.find_faults(
        instructions, export, compiled, compilation.batch, is_bf16=is_bf16
    )
    report.layout = count_layout(compiled.hlo, export.host_ops)
    report.compile_s = compiled.facts.compile_s
    return report


def _add_bundles(
    report: Report, compilation: Compilation, compiled: Compiled, instructions: list[Instruction]
) -> set[str]:
    """Write what bundles say into the report; gives the names of operations that are in it."""
    if compiled.costs is None:
        return set()
    generation = compilation.target.generation
    program = count_step(instructions, compiled.costs, generation)
    report.bundles = create_bundle_report(program, generation)
    report.bundles_mcycles = report.bundles.with_dma_mcycles
    counted = {item.instruction.name for item in program.operations if item.cost}
    return counted | {item.name for item in instructions if is_copy_beside(item)}


def resolve_parts(compilation: Compilation) -> Compilation:
    """Return the compilation of a run whose micro-batches are searched.

    Raises:
      UserError: there is no verdict on it.
    """
    config = compilation.config
    if config.train.accumulate_steps != "auto":
        return compilation
    parts, reason = choose_parts(config, compute_step_hash(config), *_name_step(compilation))
    _log(f"train.accumulate_steps (auto) is {parts}: {reason}")
    return split(compilation, parts)


def split(compilation: Compilation, parts: int) -> Compilation:
    """Return the same step in so many micro-batches."""
    return replace(
        compilation, config=change(compilation.config, train={"accumulate_steps": parts})
    )


def find_micro_batches(compilation: Compilation, options: argparse.Namespace) -> Report:
    """Report the cheapest split of a step, compiled as a whole; print all that were tried.

    Raises:
      UserError: none fits.
    """

    def probe(examples: int) -> Report:
        is_whole = examples == compilation.batch
        chosen = options if is_whole else _without_files(options)
        return create_report(replace(split(compilation, 1), batch=examples), chosen)

    splits, place = splitting.search_micro_batches(
        compilation.batch,
        probe,
        lambda parts: create_report(split(compilation, parts), options),
    )
    if place is None:
        raise UserError(
            f"--batch ({compilation.batch}) does not fit {compilation.target.name} in up to "
            f"{splits[-1].parts} micro-batches; lower it, or shard the state"
        )
    report = splits[place].report
    report.micro_batches = splitting.describe_splits(splits, compilation.batch, place)
    splitting.print_splits(report.micro_batches, report.unit)
    name = ":".join(str(part) for part in _name_step(compilation))
    step = compute_step_hash(compilation.config)
    entry = f"{{parts: {splits[place].parts}, step: {step}, graph: {report.graph}}}"
    print(f"verdict for train.accumulate_steps=auto: train.verdicts {{{name}: {entry}}}")
    if options.write:
        splitting.write_verdict(options.config, name, entry)
    return report


def _name_step(compilation: Compilation) -> tuple[str, int]:
    """Chip and its examples, as `train.verdicts` names a step."""
    chip = compilation.target.generation.name
    return chip, get_examples_per_chip(chip, compilation.batch)


def _check_search(options: argparse.Namespace, compilation: Compilation) -> None:
    """Refuse flags that do not go together, before anything is compiled."""
    if options.write and not options.micro_batches:
        raise UserError("--write writes what --micro-batches finds; give both")
    if options.micro_batches and options.max_batch:
        raise UserError("--micro-batches and --max-batch are two searches; give one of them")
    generation = compilation.target.generation
    if not options.write:
        return
    if generation not in LAUNCHED:
        names = ", ".join(model.name for model in LAUNCHED)
        raise UserError(
            f"--write is for chips that tell their name to a run ({names}), not for "
            f"{generation.name}; give train.accumulate_steps a number"
        )
    splitting.require_section(options.config)


def find_max_batch(compilation: Compilation, options: argparse.Namespace, report: Report) -> None:
    """Search the largest batch of a device that fits, and write it into the report.

    Raises:
      UserError: none fits.
    """
    unit = _BATCH_STEP * compilation.config.train.known_parts
    memory = report.memory
    search = BatchSearch(unit, memory.usable_bytes, {compilation.batch: memory.peak_bytes})

    def measure(batch: int) -> int:
        again = Compilation(compilation.config, compilation.target, compilation.chips, batch)
        return create_report(again, _without_files(options)).memory.peak_bytes

    search.run(measure)
    if search.largest_fitting is None:
        raise UserError(
            f"no batch of a multiple of {unit} fits {compilation.target.name}; shard the state"
        )
    report.max_batch_per_chip = search.largest_fitting
    report.too_large_batch_per_chip = search.smallest_failing


def _without_files(options: argparse.Namespace) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(options), "hlo": None})


def _choose_batch(options: argparse.Namespace, config: RunConfig, target: Target) -> int:
    """Examples of a step on each device."""
    if options.batch is not None:
        if options.batch < 1:
            raise UserError(f"--batch ({options.batch}) must be at least 1")
        return options.batch
    devices = options.chips if options.chips > 1 else target.devices
    batch, rest = divmod(config.data.global_batch_size, devices)
    if rest or not batch:
        raise UserError(
            f"data.global_batch_size ({config.data.global_batch_size}) is not divisible by the "
            f"{devices} devices of --target {target.name}; give --batch, the examples of a device"
        )
    return batch


def _read_sizes(options: argparse.Namespace) -> dict[str, int]:
    """Sizes that stand in for a dataset that is not here."""
    sizes = {} if options.num_classes is None else {"num_classes": options.num_classes}
    for text in options.assume:
        name, _, number = text.partition("=")
        if not number.isdecimal() or not int(number):
            raise UserError(f"--assume ({text!r}) must be NAME=NUMBER, such as vocab_size=32000")
        sizes[name] = int(number)
    return sizes


def describe_step(compilation: Compilation) -> JsonObject:
    """Check what is known of a verdict before anything is compiled."""
    return {
        "schema_version": SCHEMA_VERSION,
        "estimated_mcycles": None,
        "target": compilation.target.name,
        "chips": compilation.chips,
        "examples_per_chip": compilation.batch,
    }


def _check_limit(report: Report, limit: float | None) -> int:
    """Hold the cost against a number, by the gate of all programs."""
    if limit is None:
        return 0
    cost = report.estimated_mcycles
    bad = ["the program does not fit, so it has no cost"] if cost is None else []
    gate = Gate("estimated_mcycles", max_pct=DEFAULT_PCT, direction="lower")
    checks = check_samples(gate, {"limit": limit}, {} if cost is None else {"now": cost}, bad)
    print(
        f"--limit: {cost or math.nan:.2f} Mcyc against {limit:.2f}: {checks.outcome}, "
        f"{checks.reason}"
    )
    return get_code([checks])


def _write(report: Report, path: Path | None) -> None:
    if path is not None:
        path.write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")


def _log(text: str) -> None:
    sys.stderr.write(f"{text}\n")
