"""Checks whether this machine, or every worker of a pod, is fit for a run.

    python -m tools.doctor --data-dir data --output runs
    python -m tools.doctor --tpu NAME --zone ZONE --output gs://BUCKET/runs

Prints a line for each check: green, yellow (works, but), or red, with the way out. Exits with 1 if
one is red. It works before anything is installed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from tools.doctor import devices, host, report, software, storage, torch_tpu
from tools.doctor.machine import RED, Finding, Machine, Requirements, yellow
from tools.doctor.pod import examine_pod
from train.commands import DEFAULT_STACK, STACKS, Tpu
from train.execute import Executor
from train.xla_dist import add_stack
from utils.errors import UserError
from utils.programs import CommandLine, create_program_parser
from utils.storage.installation import name_commands

CHECKS: dict[str, Callable[[Machine], Finding]] = {
    "python": software.check_python,
    "torch": software.check_torch,
    "torch_tpu": torch_tpu.check_torch_tpu,
    "tensorflow": software.check_imports,
    "clashes": software.check_clashes,
    "variables": software.check_variables,
    "tcmalloc": software.check_allocator,
    "tpu": devices.check_tpu,
    "topology": devices.check_topology,
    "tpu busy": devices.check_busy,
    "cuda": devices.check_cuda,
    "device step": devices.check_step,
    "processor": host.check_processor,
    "open files": host.check_open_files,
    "/dev/shm": host.check_shm,
    "memory": host.check_memory,
    "checkpoint disk": host.check_checkpoint_disk,
    "compile cache": host.check_cache_disk,
    "clock": host.check_clock,
    "credentials": storage.check_credentials,
    "output": storage.check_output,
    "dataset": storage.check_dataset,
}
# Checks that run at a time: some wait for their children.
_AT_ONCE = 3


def examine_chosen(arguments: argparse.Namespace) -> int:
    """Examine all workers of a TPU, or this machine; return the exit code."""
    if arguments.tpu:
        return examine_workers(arguments)
    if arguments.stack != DEFAULT_STACK:
        raise UserError(
            f"--stack ({arguments.stack}) needs --tpu; here, run the Python of its environment: "
            f"{STACKS[arguments.stack].venv}/bin/python -m tools.doctor"
        )
    return examine_here(arguments)


def examine_here(arguments: argparse.Namespace) -> int:
    """Examine this machine and print the findings; return the exit code."""
    findings = examine(Machine(requirements=create_requirements(arguments)))
    if arguments.json:
        print(report.format_json(findings))
    else:
        print(report.format_lines(findings, colour=sys.stdout.isatty()))
        if arguments.fix_hints:
            print(f"\nways out:\n{report.format_hints(findings) or 'none is needed'}")
    return int(report.get_verdict(findings) == RED and not arguments.exit_zero)


def create_parser() -> argparse.ArgumentParser:
    """Create the parser of the flags."""
    parser = create_program_parser(__doc__, prog="python -m tools.doctor")
    add = parser.add_argument
    add("--config", default="", help="take data, output and shuffle buffer from this YAML")
    add("--data-dir", default="", metavar="D", help="directory with the dataset: read a record")
    add("--dataset", default="", help="its name, if --data-dir holds several")
    add("--output", default="", metavar="URL", help="run store to write to (default runs)")
    text = "runtime.compile_cache of the run (default auto)"
    add("--compile-cache", default="", metavar="DIR", help=text)
    add("--shuffle-gib", type=float, help="data.shuffle_gib of the run (default 1)")
    add("--processes", type=int, default=0, help="input processes of a host (default: chips)")
    add("--json", action="store_true", help="one line of JSON instead of a report")
    add("--fix-hints", action="store_true", help="list the ways out at the end, worst first")
    add("--tpu", default="", metavar="NAME", help="look at all workers of this TPU VM or pod")
    add("--zone", default="", help="its zone (default: gcloud's)")
    add("--project", default="", help="its project (default: gcloud's)")
    add_stack(parser)
    add("--dry-run", action="store_true", help="with --tpu: print the commands only")
    add("--in-pod", action="store_true", help=argparse.SUPPRESS)
    add("--exit-zero", action="store_true", help=argparse.SUPPRESS)
    return parser


def examine(machine: Machine) -> list[Finding]:
    """Run all checks; return the findings in their order."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(partial(run_check, machine=machine), CHECKS))


def run_check(name: str, machine: Machine) -> Finding:
    """Run a check; an exception in it becomes a yellow finding."""
    try:
        finding = CHECKS[name](machine)
    except Exception as error:  # anything, on an unusual machine
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        finding = yellow(f"could not look: {reason}", "report this with the line")
    text, hint = name_commands(finding.text), name_commands(finding.hint)
    return replace(finding, name=name, text=text, hint=hint)


def create_requirements(arguments: argparse.Namespace) -> Requirements:
    """Return settings of the planned run, flags over configuration; a UserError if it is wrong."""
    planned = _read_config(arguments.config) if arguments.config else Requirements()
    given = {
        "data_dir": arguments.data_dir,
        "data_name": arguments.dataset,
        "output": arguments.output,
        "compile_cache": arguments.compile_cache,
        "shuffle_gib": arguments.shuffle_gib,
        "processes": arguments.processes,
    }
    values = {name: value for name, value in given.items() if value not in ("", None)}
    planned = replace(planned, **values, in_pod=arguments.in_pod)
    return replace(
        planned,
        data_dir=_make_absolute(planned.data_dir),
        output=_make_absolute(planned.output),
        compile_cache=_make_absolute(planned.compile_cache),
    )


def _make_absolute(path: str) -> str:
    """Return the absolute path of a directory; URLs, `auto` and empty ones stay."""
    return path if path in ("", "auto") or "://" in path else str(Path(path).absolute())


def examine_workers(arguments: argparse.Namespace) -> int:
    """Print the table of all workers; return 1 if one of them is red."""
    names = "config", "data_dir", "dataset", "output", "compile_cache", "shuffle_gib", "processes"
    values = {name.replace("_", "-"): getattr(arguments, name) for name in names}
    flags = [f"--{name}={value}" for name, value in values.items() if value]
    tpu = Tpu(arguments.tpu, arguments.zone, arguments.project)
    executor = Executor(dry_run=arguments.dry_run)
    workers = examine_pod(tpu, flags, executor, stack=arguments.stack)
    if arguments.dry_run:
        return 0
    if arguments.json:
        for worker, findings in workers.items():
            print(f'{{"worker": {worker}, "report": {report.format_json(findings)}}}')
    else:
        print(report.format_table(workers))
    return int(RED in map(report.get_verdict, workers.values()))


def _read_config(path: str) -> Requirements:
    try:
        from utils.config.load import load_config
    except ImportError as error:
        raise UserError(f"--config needs the environment of a run: {error}") from error
    config = load_config(["--config", path])
    return Requirements(
        data_dir=config.data.root,
        data_name=config.data.name if config.data.source == "tfds" else "",
        output=config.run.output_dir,
        compile_cache=config.runtime.compile_cache,
        shuffle_gib=config.data.shuffle_gib,
    )


main = CommandLine(create_parser, examine_chosen)

if __name__ == "__main__":
    sys.exit(main())
