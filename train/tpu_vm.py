"""Manages a TPU VM or pod slice, from its creation to the end of a run on it.

    python -m train.tpu_vm create NAME --accelerator-type v5litepod-8 --zone ZONE --spot
    python -m train.tpu_vm run NAME --zone ZONE -- python main.py --config C --run.output_dir OUT
    python -m train.tpu_vm delete NAME --zone ZONE --yes

Every verb can be repeated: it reports what exists already and does not create it twice. `run` ships
the commit, sets the workers up, and starts again with --resume auto after a preemption. --dry-run
shows the commands.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys

from train import commands
from train.commands import STACKS, CreateOptions, Tpu
from train.execute import Executor
from train.experiments import check_hosts
from train.lifecycle import create, delete, describe, read_queued_state, stop
from train.provision import set_up, sync
from train.recover import RecoverOptions, Recovery
from train.xla_dist import add_launch, add_stack, add_zone_flags, create_options, create_remote
from utils.errors import UserError
from utils.generations import LAUNCHED, check_stack, find_slice
from utils.programs import CommandLine, create_program_parser


def run_verb(arguments: argparse.Namespace) -> int:
    """Run the verb; return the exit code."""
    if arguments.command and arguments.verb not in ("ssh", "run"):
        raise UserError(f"{arguments.verb} takes no command after --")
    return _VERBS[arguments.verb](arguments, Executor(dry_run=arguments.dry_run))


def create_parser() -> argparse.ArgumentParser:
    """Create the parser of the command line."""
    parser = create_program_parser(__doc__, prog="python -m train.tpu_vm")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def add_verb(name: str, text: str) -> argparse.ArgumentParser:
        verb = verbs.add_parser(name, help=text, description=text)
        verb.add_argument("name", help="of the TPU VM")
        add_zone_flags(verb)
        return verb

    _add_create_flags(add_verb("create", "create a TPU VM, or start a stopped one"))
    add_verb("describe", "state, type and hosts").add_argument("--json", action="store_true")
    add = add_verb("ssh", "a shell on one worker, or a command on workers").add_argument
    add("--worker", default="0", help="its number, or all with a command after -- (default 0)")
    _add_tree_flags(add_verb("sync", "ship the committed tree to every worker"))
    setup = add_verb("setup", "make the virtual environment on every worker; check it")
    setup.add_argument("--workdir", default=commands.WORKDIR, help="where the tree is")
    add_stack(setup)
    _add_run_flags(add_verb("run", "sync, setup, run, and go on after a preemption"))
    add = add_verb("logs", "what the workers have written").add_argument
    add("--worker", default="all", help="one worker's number (default all)")
    add("--run-id", default="", help="a launch's name (default: the newest)")
    add("--lines", type=int, default=50, help="last lines to show (default 50)")
    add("--follow", action="store_true", help="go on showing what comes")
    add_verb("stop", "stop the machine; its disk stays and is paid for")
    add = add_verb("delete", "delete the machine and its disk").add_argument
    add("--yes", action="store_true", help="do not ask")
    return parser


def _add_create_flags(verb: argparse.ArgumentParser) -> None:
    types = ", ".join(f"{generation.prefix}-N" for generation in LAUNCHED)
    add = verb.add_argument
    add("--accelerator-type", required=verb.prog.endswith("create"), default="", help=types)
    add_stack(verb)
    add("--version", default="", help="runtime version (default: the generation's)")
    tier = verb.add_mutually_exclusive_group()
    tier.add_argument("--spot", action="store_true", help="cheaper; may be taken away")
    tier.add_argument("--reserved", action="store_true", help="from a reservation")
    add("--queued", action="store_true", help="as a queued resource: wait for capacity")
    add("--valid-until", default="", metavar="6h", help="give a queued request up after this")


def _add_tree_flags(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--dirty", action="store_true", help="ship what is not committed, too")
    if not verb.prog.endswith("run"):
        text = "below a worker's home (default trainer)"
        verb.add_argument("--workdir", default=commands.WORKDIR, help=text)


def _add_run_flags(verb: argparse.ArgumentParser) -> None:
    _add_create_flags(verb)
    _add_tree_flags(verb)
    add_launch(verb)
    verb.set_defaults(venv=None)
    add = verb.add_argument
    add(
        "--max-restarts",
        type=int,
        default=10,
        help="restarts in a row of starts that did not last --soon-s (default 10)",
    )
    add(
        "--backoff-s",
        type=float,
        default=30.0,
        help="wait before the first of them, doubled by each further one up to 600 (default 30)",
    )
    add(
        "--soon-s",
        type=float,
        default=600.0,
        help="a start that lasts so long has got on and is not counted (default 600)",
    )
    add("--no-setup", action="store_true", help="neither ship the tree nor set up")


def _run_create(arguments: argparse.Namespace, executor: Executor) -> int:
    options = _get_create_options(arguments)
    return _print_note(executor, create(_get_tpu(arguments), executor, options=options))


def _run_describe(arguments: argparse.Namespace, executor: Executor) -> int:
    """Print the facts of a TPU VM; the exit code is 1 if it does not exist."""
    tpu = _get_tpu(arguments)
    facts = describe(tpu, executor)
    if facts is None:
        waiting = read_queued_state(tpu, executor)
        print(f"{tpu.name}: queued, {waiting}" if waiting else f"{tpu.name} does not exist")
        return 0 if waiting else 1
    if executor.dry_run:
        return 0
    if arguments.json:
        print(json.dumps(facts.__dict__))
        return 0
    health = f", {facts.health}" if facts.health else ""
    print(f"{tpu.name}: {facts.accelerator_type}, {facts.state}{health}, {facts.runtime_version}")
    for number, address in enumerate(facts.hosts):
        print(f"  worker {number}: {address}")
    return 0


def _run_ssh(arguments: argparse.Namespace, executor: Executor) -> int:
    tpu = _get_tpu(arguments)
    if not arguments.command:
        if arguments.worker == "all":
            raise UserError("--worker all needs a command after --; choose one worker for a shell")
        return executor.call(commands.login(tpu, arguments.worker))
    text = shlex.join(arguments.command)
    return executor.call(commands.run_remote(tpu, text, worker=arguments.worker))


def _run_sync(arguments: argparse.Namespace, executor: Executor) -> int:
    """Replace the files of the tree; runs, data and .venv stay."""
    sync(_get_tpu(arguments), executor, workdir=arguments.workdir, dirty=arguments.dirty)
    return 0


def _run_setup(arguments: argparse.Namespace, executor: Executor) -> int:
    """Set up the workers; the exit code is 1 if they differ or do not fit the stack."""
    workdir, stack = arguments.workdir, arguments.stack
    return 0 if set_up(_get_tpu(arguments), executor, workdir=workdir, stack=stack) else 1


def _run_run(arguments: argparse.Namespace, executor: Executor) -> int:
    """Run the program; the exit code is that of its last attempt."""
    options = RecoverOptions(
        max_restarts=arguments.max_restarts,
        backoff_s=arguments.backoff_s,
        soon_s=arguments.soon_s,
        create=_get_create_options(arguments) if arguments.accelerator_type else None,
        provision=not arguments.no_setup,
        dirty=arguments.dirty,
        stack=arguments.stack,
    )
    if arguments.venv is None:
        arguments.venv = "" if arguments.conda_env else STACKS[arguments.stack].venv
    remote, fanout = create_remote(arguments), create_options(arguments)
    if arguments.accelerator_type:
        check_hosts(remote.words, find_slice(arguments.accelerator_type).hosts)
    return Recovery(_get_tpu(arguments), executor, options=options, fanout=fanout).run(remote)


def _run_logs(arguments: argparse.Namespace, executor: Executor) -> int:
    """Show the workers' logs, also of launches that another machine has started."""
    text = commands.worker_logs(arguments.run_id, lines=arguments.lines, follow=arguments.follow)
    return executor.call(commands.run_remote(_get_tpu(arguments), text, worker=arguments.worker))


def _run_stop(arguments: argparse.Namespace, executor: Executor) -> int:
    return _print_note(executor, stop(_get_tpu(arguments), executor))


def _run_delete(arguments: argparse.Namespace, executor: Executor) -> int:
    if not arguments.yes and not arguments.dry_run:
        if not sys.stdin.isatty():
            raise UserError("delete needs a confirmation and there is no terminal; add --yes")
        question = f"delete {arguments.name} with its disk? [y/N] "
        if input(question).strip().lower() not in ("y", "yes"):
            raise UserError("not deleted")
    return _print_note(executor, delete(_get_tpu(arguments), executor))


def _get_tpu(arguments: argparse.Namespace) -> Tpu:
    return Tpu(arguments.name, arguments.zone, arguments.project)


def _print_note(executor: Executor, text: str) -> int:
    """Print what was done, except in a dry run; return the exit code 0."""
    if not executor.dry_run:
        print(text)
    return 0


def _get_create_options(arguments: argparse.Namespace) -> CreateOptions:
    check_stack(arguments.accelerator_type, arguments.stack)
    if arguments.valid_until and not arguments.queued:
        raise UserError("--valid-until is for --queued requests; add --queued")
    return CreateOptions(
        accelerator_type=arguments.accelerator_type,
        runtime_version=arguments.version,
        spot=arguments.spot,
        reserved=arguments.reserved,
        queued=arguments.queued,
        valid_until=arguments.valid_until,
    )


_VERBS = {
    "create": _run_create,
    "describe": _run_describe,
    "ssh": _run_ssh,
    "sync": _run_sync,
    "setup": _run_setup,
    "run": _run_run,
    "logs": _run_logs,
    "stop": _run_stop,
    "delete": _run_delete,
}


main = CommandLine(create_parser, run_verb, takes_command=True)

if __name__ == "__main__":
    sys.exit(main())
