"""Runs a command on every worker of a TPU VM or pod slice, with their output in one place.

    python -m train.xla_dist --tpu=NAME --zone=ZONE --venv=.venv -- python main.py --config C

The flags are those of torch_xla.distributed.xla_dist, which torch_xla removed in 2.1. The command
runs in ~/trainer of each worker, where `python -m train.tpu_vm sync` puts the tree. If a worker
fails, the others are ended and its exit code is returned. Ctrl-C ends all of them; the workers'
lines are kept in --logs-dir/RUN_ID/worker_N.log.
"""

from __future__ import annotations

import argparse
import sys

from train import fanout
from train.commands import DEFAULT_STACK, STACKS, WORKDIR, RemoteCommand, Tpu
from train.execute import Executor
from train.experiments import check_hosts, expand
from train.lifecycle import require_ready
from utils.errors import UserError
from utils.programs import CommandLine, create_program_parser

_GONE = {
    "restart_tpuvm_pod_server": "--restart-tpuvm-pod-server",
    "tpuvm_server_port": "--tpuvm-server-port",
}


def create_parser() -> argparse.ArgumentParser:
    """Create the parser of the command line."""
    parser = create_program_parser(
        __doc__, prog="python -m train.xla_dist", epilog="-- begins the command"
    )
    add_zone_flags(parser)
    add_launch(parser)
    add = parser.add_argument
    add("--tpu", required=True, metavar="NAME", help="the TPU VM or pod slice")
    add("--stop", default="", metavar="RUN_ID", help="end a launch that is still on the workers")
    add("--restart-tpuvm-pod-server", action="store_true", help="ignored: there is no such server")
    add("--tpuvm-server-port", type=int, help="ignored: there is no such server")
    return parser


def add_zone_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that locate a TPU VM, and --dry-run."""
    add = parser.add_argument
    add("--zone", default="", help="its zone (default: gcloud's)")
    add("--project", default="", help="its project (default: gcloud's)")
    add("--dry-run", action="store_true", help="print the commands instead of running them")


def add_stack(parser: argparse.ArgumentParser) -> None:
    """Add the flag that chooses what drives the chips."""
    text = f"what drives the chips: {', '.join(STACKS)} (default {DEFAULT_STACK})"
    parser.add_argument("--stack", choices=tuple(STACKS), default=DEFAULT_STACK, help=text)


def add_launch(parser: argparse.ArgumentParser) -> None:
    """Add the flags that define how a command runs on the workers."""
    add = parser.add_argument
    add("--env", action="append", default=[], metavar="K=V", help="a variable of the command")
    add("--workdir", default=WORKDIR, help="its directory below a worker's home (default trainer)")
    add("--venv", default="", help="virtual environment, relative to --workdir")
    add("--conda-env", default="", help="conda environment instead of --venv")
    add("--end-others", action="store_true", help="end what an earlier launch left running")
    add("--run-id", default="", help="name of this launch (default: the time)")
    add("--logs-dir", default="", help="where the workers' lines go (default runs/launches)")
    add("--start-timeout-s", type=float, default=600.0, help="for all workers to begin")
    add("--grace-s", type=float, default=120.0, help="from SIGTERM to SIGKILL (default 120)")


def run(arguments: argparse.Namespace) -> int:
    """Start or end a launch; return the exit code."""
    executor = Executor(dry_run=arguments.dry_run)
    tpu = Tpu(arguments.tpu, arguments.zone, arguments.project)
    for name, flag in _GONE.items():
        if getattr(arguments, name):
            print(f"{flag} is ignored: PJRT, in place since torch_xla 2.1, has no server to start")
    if arguments.stop:
        fanout.copy_worker_script(tpu, executor)
        fanout.stop_everywhere(tpu, executor, run_id=arguments.stop, grace_s=arguments.grace_s)
        return 0
    remote = create_remote(arguments)
    hosts = len(require_ready(tpu, executor).hosts)
    check_hosts(remote.words, hosts)
    options = create_options(arguments)
    if not arguments.dry_run:
        print(f"[launch] {options.run_id}: {hosts} workers of {tpu.name}", flush=True)
    outcome = fanout.fan_out(tpu, remote, hosts=hosts, options=options, executor=executor)
    if outcome.cause:
        print(f"[launch] {outcome.cause}", flush=True)
    if not arguments.dry_run:
        print(f"[launch] logs: {options.logs_dir / options.run_id}", flush=True)
    return outcome.code


def create_options(arguments: argparse.Namespace) -> fanout.FanoutOptions:
    """Create the options of a launch from its flags."""
    return fanout.FanoutOptions(
        run_id=arguments.run_id or fanout.create_run_id(dry_run=arguments.dry_run),
        logs_dir=fanout.get_logs_dir(arguments.logs_dir),
        start_timeout_s=arguments.start_timeout_s,
        grace_s=arguments.grace_s,
    )


def create_remote(arguments: argparse.Namespace) -> RemoteCommand:
    """Create the workers' command; a UserError if it is missing, or its surroundings are wrong."""
    if not arguments.command:
        raise UserError("there is no command; write it after --, such as -- python main.py ...")
    if arguments.venv and arguments.conda_env:
        raise UserError("--venv and --conda-env exclude each other; keep one of them")
    wrong = [pair for pair in arguments.env if "=" not in pair or pair.startswith("=")]
    if wrong:
        raise UserError(f"--env {wrong[0]!r} is not of the form NAME=VALUE; write both")
    return RemoteCommand(
        words=tuple(expand(arguments.command)),
        env=tuple(tuple(pair.split("=", 1)) for pair in arguments.env),
        workdir=arguments.workdir,
        venv=arguments.venv,
        conda_env=arguments.conda_env,
        end_others=arguments.end_others,
    )


main = CommandLine(create_parser, run, takes_command=True)

if __name__ == "__main__":
    sys.exit(main())
