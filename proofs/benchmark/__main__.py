"""How fast a run trains, measured through the engine's own loop; compares with earlier reports.

    python -m tools.benchmark --config configs/x.yaml --steps 20 --repeats 5 --json now.json
    python -m tools.benchmark --config configs/x.yaml --input synthetic --processes 1,2,4
    python -m tools.benchmark --config configs/x.yaml --json now.json --compare base.json
    python -m tools.benchmark --config configs/x.yaml --compare base.json --gate img_per_s:3:-:major

Takes every flag of main.py. Warms up until nothing compiles, then times blocks of steps by the
wall clock, input included. Nothing is evaluated or saved.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from engine import NonFiniteError
from job.check import check
from proofs.benchmark.bare import check_bare
from proofs.benchmark.configuration import create_measured_config
from proofs.benchmark.loop import Pace, UnstableGraphsError, measure
from proofs.benchmark.report import SCHEMA_VERSION, get_rate_name, print_report, write_csv
from store.quality.report_comparison import (
    add_report_flags,
    check_report_flags,
    evaluate_report,
    read_base,
)
from store.quality.report_gates import check_settings
from store.quality.reports import read_report
from store.record.environment import read_environment
from utils.config.load import RunConfig, load_config
from utils.endings import GraphBudgetError
from utils.errors import EXIT_FAILED, UserError
from utils.json_types import JsonObject, make_finite
from utils.programs import CommandLine, create_program_parser, get_run_flags
from utils.runtime.choice import choose_device, is_silent_rank
from utils.runtime.launcher import launch
from utils.runtime.processes.children import GroupError
from utils.runtime.processes.ranks import ReplicaError
from utils.runtime.start import get_start
from utils.storage.json_files import write_json

# A figure may be worse by so much where nothing else is said.
_SHARE = 0.05
_PROCESS_KEY = "--runtime.num_processes"


def create_parser() -> argparse.ArgumentParser:
    """Create the command line; all other flags are keys of the run's configuration."""
    parser = create_program_parser(
        __doc__,
        prog="python -m tools.benchmark",
        allow_abbrev=False,
        epilog="All other flags are keys of the run's configuration, as for main.py.",
    )
    add = parser.add_argument
    add("--config", help="YAML of the run, as for main.py")
    add(
        "--input",
        choices=("real", "synthetic"),
        help="real: the run's own (default); synthetic: "
        "random batches of its shape, ready in memory (default with --bare)",
    )
    add("--steps", type=int, default=20, help="steps of a block (default %(default)s)")
    add("--repeats", type=int, default=5, help="blocks; medians count (default %(default)s)")
    add("--warmup-steps", type=int, default=5, help="at least so many; more until nothing compiles")
    add(
        "--processes",
        metavar="N,N,...",
        help="measure with these numbers of processes in turn, "
        "at the same global batch, and their scaling efficiency",
    )
    add(
        "--bare",
        action="store_true",
        help="also a bare loop of the same model and optimizer, in turns with the engine",
    )
    add("--random-teachers", action="store_true", help="random weights for teachers without any")
    add("--json", type=Path, metavar="FILE", help="write the report here")
    add("--csv", type=Path, metavar="FILE", help="write it here, a line for each measurement")
    add(
        "--tolerance",
        type=float,
        help="share by which a figure may be worse than in --compare, "
        "where no --gate says more (default 0.05)",
    )
    add_report_flags(parser)
    add("--cores", type=int, help=argparse.SUPPRESS)
    return parser


def _check_options(options: argparse.Namespace) -> None:
    """Check the tool's own flags; UserError for a value that nothing can be measured with."""
    for name, least in (("steps", 1), ("repeats", 1), ("warmup_steps", 0)):
        value = getattr(options, name)
        if value < least:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} ({value}) must be at least {least}; raise it")
    if options.tolerance is not None and not 0 <= options.tolerance < 1:
        raise UserError(f"--tolerance ({options.tolerance}) must lie in [0, 1), such as 0.05")
    check_report_flags(options, tolerance="--tolerance")
    if options.bare and options.input == "real":
        raise UserError("--bare has no input pipeline; use --input synthetic")
    options.input = options.input or ("synthetic" if options.bare else "real")
    if options.processes is not None:
        options.processes = _parse_processes(options.processes)
        if any(token.partition("=")[0] == _PROCESS_KEY for token in options.rest):
            raise UserError(f"--processes and {_PROCESS_KEY} say the same; drop one of them")
        if options.bare and max(options.processes) > 1:
            raise UserError("--bare is a loop of one process; drop --processes")
    for path in (options.json, options.csv):
        if path is not None and not path.absolute().parent.is_dir():
            raise UserError(f"{path}: there is no directory {path.parent}; make it first")


def _parse_processes(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise UserError(f"--processes ({text!r}) must be numbers above 0, such as 1,2,4")
    return sorted({int(word) for word in words})


def benchmark(options: argparse.Namespace) -> int:
    """Measure what is asked for, write and compare it; gives the exit code."""
    _check_options(options)
    base = read_base(options)
    flags = get_run_flags(options)
    if options.cores:
        # Before a framework starts its threads, as many as there are cores.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    config = load_config(flags)
    if base is not None:
        settings = config.model_dump(mode="json")
        check_settings(base, settings, options.input, options.processes or ())
    if options.processes:
        code, report = measure_scaling(options, config, flags)
    else:
        code, report = measure_once(options, config)
    if report is None:
        return code
    if options.json:
        write_json(options.json, make_finite(report))
    if options.csv:
        write_csv(report, options.csv)
    print_report(report)
    share = _SHARE if options.tolerance is None else options.tolerance
    code, comparison = evaluate_report(options, base, report, max_pct=100 * share)
    if options.json and comparison:
        write_json(options.json, make_finite({**report, "comparison": comparison}))
    return code


def measure_once(options: argparse.Namespace, config: RunConfig) -> tuple[int, JsonObject | None]:
    """Exit code and report of one measurement; no report on ranks above zero."""
    import json

    choose_device(config.runtime)
    with tempfile.TemporaryDirectory(prefix="benchmark_") as folder:
        is_synthetic = options.input == "synthetic"
        measured = create_measured_config(
            config, Path(folder), synthetic=is_synthetic, random_teachers=options.random_teachers
        )
        if options.bare:
            check_bare(measured)
        job = check(measured)
        logging.captureWarnings(True)
        path = Path(folder) / "result.json"
        pace = Pace(
            options.steps, options.repeats, options.warmup_steps, is_synthetic, options.bare
        )
        try:
            code = launch(
                measured.runtime, measure, job, pace, str(path), own_code=measured.run.own_code
            )
        except (
            GraphBudgetError,
            NonFiniteError,
            ReplicaError,
            GroupError,
            UnstableGraphsError,
        ) as error:
            sys.stderr.write(f"the measurement was stopped: {error}\n")
            return EXIT_FAILED, None
        if code or not path.is_file():
            return code, None
        record = json.loads(path.read_text(encoding="utf-8"))
    return 0, create_report(options, config, [record["result"]], record["environment"])


def measure_scaling(
    options: argparse.Namespace, config: RunConfig, flags: Sequence[str]
) -> tuple[int, JsonObject | None]:
    """Measure each number of processes, each in a fresh process of its own.

    On the host's cores every process gets the same share, whatever their number, so that two
    processes have twice the cores of one.
    """
    cores = len(os.sched_getaffinity(0))
    share = max(1, cores // max(options.processes)) if _computes_on_host(config) else 0
    results: list[JsonObject] = []
    environment: JsonObject = {}
    with tempfile.TemporaryDirectory(prefix="benchmark_") as folder:
        path = Path(folder) / "report.json"
        for count in options.processes:
            command = [sys.executable, "-m", "tools.benchmark", *flags]
            command += [f"{_PROCESS_KEY}={count}", f"--json={path}", f"--input={options.input}"]
            command += [f"--steps={options.steps}", f"--repeats={options.repeats}"]
            command += [f"--warmup-steps={options.warmup_steps}"]
            command += ["--random-teachers"] if options.random_teachers else []
            command += [f"--cores={min(cores, share * count)}"] if share else []
            # Of each process; what the caller has set stands behind it, and wins.
            threads = {"OMP_NUM_THREADS": str(share)} if share else {}
            # A child prints a table of its own; the table of all comes last.
            done = subprocess.run(command, env={**threads, **os.environ}, stdout=subprocess.DEVNULL)
            if done.returncode:
                return done.returncode, None
            report = read_report(path, "--processes")
            results += report["results"]
            environment = report["environment"]
    first, rate = results[0], get_rate_name(results[0])
    # Against the smallest number of processes, which was measured first.
    for result in results:
        per_process = result[rate] / result["processes"]
        result["scaling_efficiency"] = per_process / (first[rate] / first["processes"])
        result["cores_per_process"] = share or None
    return 0, create_report(options, config, results, environment)


def _computes_on_host(config: RunConfig) -> bool:
    name = choose_device(config.runtime)
    get_start(name).prepare_environment()
    return name == "cpu" or (name == "xla" and os.environ.get("PJRT_DEVICE") == "CPU")


def create_report(
    options: argparse.Namespace,
    config: RunConfig,
    results: list[JsonObject],
    runtime_facts: JsonObject,
) -> JsonObject:
    """Everything that a reader needs to believe the figures, or to measure them again."""
    settings = {
        "input": options.input,
        "warmup_steps_min": options.warmup_steps,
        "random_teachers": options.random_teachers,
        "load_average": list(os.getloadavg()),
        "command": shlex.join(sys.argv),
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "environment": {**read_environment(), **runtime_facts},
        "settings": settings,
        "config": config.model_dump(mode="json"),
        "results": results,
    }


main = CommandLine(
    create_parser,
    benchmark,
    takes_keys=True,
    logs=True,
    interrupted="interrupted; nothing was written",
    is_silent=is_silent_rank,
)

if __name__ == "__main__":
    sys.exit(main())
