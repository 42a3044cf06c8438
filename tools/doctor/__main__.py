"""Tells whether this machine, or every worker of a pod, is fit for a run.

    python -m tools.doctor --data-dir data --output runs
    python -m tools.doctor --tpu NAME --zone ZONE --output gs://BUCKET/runs

A line for each check: green, yellow (works, but), or red, with the way out. Exits with 1 if one is
red. What could not be looked at is said to be so. It works before anything is installed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.doctor import devices, host, report, software, storage
from tools.doctor.machine import RED, YELLOW, Finding, Machine, Requirements
from tools.doctor.pod import examine_pod
from train.commands import Tpu
from train.execute import Executor
from utils.errors import UserError
from utils.programs import CommandLine, create_program_parser

CHECKS: tuple[Callable[[Machine], Finding], ...] = (
    software.check_python,
    software.check_torch,
    software.check_imports,
    software.check_clashes,
    software.check_variables,
    software.check_allocator,
    devices.check_tpu,
    devices.check_topology,
    devices.check_busy,
    devices.check_cuda,
    devices.check_step,
    host.check_processor,
    host.check_open_files,
    host.check_shm,
    host.check_memory,
    host.check_checkpoint_disk,
    host.check_cache_disk,
    host.check_clock,
    storage.check_credentials,
    storage.check_output,
    storage.check_dataset,
)
# Checks that run at a time: some wait for children of theirs.
_AT_ONCE = 3


def examine_chosen(arguments: argparse.Namespace) -> int:
    """Examine all workers of a TPU, or this machine; the exit code."""
    return examine_workers(arguments) if arguments.tpu else examine_here(arguments)


def examine_here(arguments: argparse.Namespace) -> int:
    """Examine this machine and print what was found; the exit code."""
    findings = examine(Machine(requirements=create_requirements(arguments)))
    if arguments.json:
        print(report.format_json(findings))
    else:
        print(report.format_lines(findings, colour=sys.stdout.isatty()))
        if arguments.fix_hints:
            print(f"\nways out:\n{report.format_hints(findings) or 'none is needed'}")
    return int(report.get_verdict(findings) == RED and not arguments.exit_zero)


def create_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = create_program_parser(__doc__, prog="python -m tools.doctor")
    add = parser.add_argument
    add("--config", default="", help="take data, output and shuffle buffer from this YAML")
    add("--data-dir", default="", metavar="D", help="directory with the dataset: read a record")
    add("--dataset", default="", help="its name, if --data-dir holds several")
    add("--output", default="", metavar="URL", help="run store to write to (default runs)")
    add(
        "--compile-cache",
        default="",
        metavar="DIR",
        help="runtime.compile_cache of the run (default auto)",
    )
    add("--shuffle-gib", type=float, help="data.shuffle_gib of the run (default 1)")
    add("--processes", type=int, default=0, help="input processes of a host (default: chips)")
    add("--json", action="store_true", help="one line of JSON instead of a report")
    add("--fix-hints", action="store_true", help="list the ways out at the end, worst first")
    add("--tpu", default="", metavar="NAME", help="look at all workers of this TPU VM or pod")
    add("--zone", default="", help="its zone (default: gcloud's)")
    add("--project", default="", help="its project (default: gcloud's)")
    add("--dry-run", action="store_true", help="with --tpu: print the commands only")
    add("--in-pod", action="store_true", help=argparse.SUPPRESS)
    add("--exit-zero", action="store_true", help=argparse.SUPPRESS)
    return parser


def examine(machine: Machine) -> list[Finding]:
    """Every finding, in the order of the checks."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(lambda check: run_check(check, machine), CHECKS))


def run_check(check: Callable[[Machine], Finding], machine: Machine) -> Finding:
    """A check's finding; a check that fails itself says so, it is not taken for a sound machine."""
    try:
        return check(machine)
    except Exception as error:  # whatever a strange machine brings about
        name = check.__name__.removeprefix("check_").replace("_", " ")
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return Finding(name, YELLOW, f"could not look: {reason}", "report this with the line")


def create_requirements(arguments: argparse.Namespace) -> Requirements:
    """What the user is going to do: the configuration's values, overridden by flags.

    Raises:
      UserError: the configuration is wrong.
    """
    values = {"output": "runs", "shuffle_gib": 1.0}
    if arguments.config:
        values = _read_config(arguments.config)
    given = {
        "data_dir": arguments.data_dir,
        "data_name": arguments.dataset,
        "output": arguments.output,
        "compile_cache": arguments.compile_cache,
        "shuffle_gib": arguments.shuffle_gib,
        "processes": arguments.processes,
    }
    values.update({name: value for name, value in given.items() if value not in ("", None)})
    for name in ("data_dir", "output", "compile_cache"):
        if values.get(name) not in (None, "", "auto") and "://" not in values[name]:
            values[name] = str(Path(values[name]).absolute())
    return Requirements(**values, in_pod=arguments.in_pod)


def examine_workers(arguments: argparse.Namespace) -> int:
    """The table of all workers; 1 if one of them is red."""
    flags = [
        f"{flag}={value}"
        for flag, value in (
            ("--config", arguments.config),
            ("--data-dir", arguments.data_dir),
            ("--dataset", arguments.dataset),
            ("--output", arguments.output),
            ("--compile-cache", arguments.compile_cache),
            ("--shuffle-gib", arguments.shuffle_gib),
            ("--processes", arguments.processes),
        )
        if value
    ]
    tpu = Tpu(arguments.tpu, arguments.zone, arguments.project)
    workers = examine_pod(tpu, flags, Executor(dry_run=arguments.dry_run))
    if arguments.dry_run:
        return 0
    if arguments.json:
        for worker, findings in workers.items():
            print(f'{{"worker": {worker}, "report": {report.format_json(findings)}}}')
    else:
        print(report.format_table(workers))
    verdicts = [report.get_verdict(findings) for findings in workers.values()]
    return int(RED in verdicts)


def _read_config(path: str) -> dict[str, object]:
    try:
        from utils.config.load import load_config
    except ImportError as error:
        raise UserError(f"--config needs the environment of a run: {error}") from error
    config = load_config(["--config", path])
    return {
        "data_dir": config.data.root,
        "data_name": config.data.name if config.data.source == "tfds" else "",
        "output": config.run.output_dir,
        "compile_cache": config.runtime.compile_cache,
        "shuffle_gib": config.data.shuffle_gib,
    }


main = CommandLine(create_parser, examine_chosen)

if __name__ == "__main__":
    sys.exit(main())
