"""Queues runs for the devices of this machine; they outlive the program that started them.

    python -m tools.queue submit configs/digits_student.yaml optim.lr=0.002 train.seed=1
    python -m tools.queue run --slots 2
    python -m tools.queue list
    python -m tools.queue stop first-0123456789

`run` starts jobs in their order, as many at once as it has slots, and continues those that a
preemption or a crash has ended, as `train/supervise.sh` does. It can be stopped at any time: runs
continue, and the next `run` finds them. `stop` makes a run save and end; `resume` continues it.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict

import yaml
from pydantic import ValidationError

from service.checker import Checker
from service.jobs.dispatcher import Dispatcher
from service.jobs.files import JobQueue, open_queue
from service.jobs.slots import parse_slots
from service.jobs.starters import create_starter
from service.jobs.state import ENDS, JobView
from service.jobs.submission import Submission
from store.formatting import format_time
from store.terminal import colour_word, create_console, create_table, print_json
from tools.runs.find_runs import check_store
from utils.errors import EXIT_FAILED, UserError
from utils.json_types import JsonObject
from utils.log import get_logger
from utils.programs import CommandLine, create_program_parser


def create_parser() -> argparse.ArgumentParser:
    """Create the parser of the flags."""
    parser = create_program_parser(__doc__, prog="python -m tools.queue")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add = {}
    for name, (function, text) in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(command=function)
        add[name] = command.add_argument
        add[name]("--store", default="runs", help="root of the runs (runs)")
        add[name]("--json", action="store_true", help="one object for programs")
    add["submit"]("config", metavar="CONFIG", help="as --config of main.py")
    add["submit"]("overrides", nargs="*", metavar="KEY=VALUE", help="on top of it")
    add["submit"]("--job-slots", type=int, default=1, help="that it holds (1)")
    add["run"]("--slots", default="1", help="jobs at once, or cuda:0,cuda:1,cpu (1)")
    add["run"]("--until-empty", action="store_true", help="end when no job is left")
    text = "fork runs on the CPU from a program with all imports"
    add["run"]("--warm", action="store_true", help=text)
    for name in ("stop", "resume", "log"):
        add[name]("job", metavar="JOB", help="its id, as `list` shows it")
    return parser


def run_command(options: argparse.Namespace) -> int:
    """Open the queue of the store and run the command; only `submit` creates a store."""
    if options.command is not submit:
        check_store(options.store)
    return options.command(open_queue(options.store), options)


def submit(queue: JobQueue, options: argparse.Namespace) -> int:
    """Queue a run, after the checks that main.py makes."""
    try:
        overrides = _read_overrides(options.overrides)
        submission = Submission(config=options.config, overrides=overrides, slots=options.job_slots)
    except ValidationError as error:
        raise UserError(
            f"--job-slots ({options.job_slots}) must be 1 to 64; give the number of devices that "
            "the run needs"
        ) from error
    with contextlib.closing(Checker()) as checker:
        result = checker.check(submission, queue.store)
    if result.error:
        raise UserError(result.error)
    return _show(queue.submit(submission, getpass.getuser()), options)


def show_all(queue: JobQueue, options: argparse.Namespace) -> int:
    """Show the jobs, the oldest first."""
    jobs = queue.list()
    if options.json:
        print_json({"jobs": [asdict(job) for job in jobs]})
        return 0
    table = create_table("job", "run", "state", "attempts>", "submitted", "reason")
    for job in jobs:
        state, created = colour_word(job.state), format_time(job.created)
        table.add_row(job.id, job.run, state, str(job.attempts), created, job.reason or "-")
    if jobs:
        create_console().print(table)
    else:
        sys.stdout.write(f"{queue.folder} holds no job\n")
    return 0


def run(queue: JobQueue, options: argparse.Namespace) -> int:
    """Start waiting jobs and continue those that ended too early, until stopped."""
    known: dict[str, str] = {}
    received: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    # A script's shell starts `... run &` with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def look() -> bool:
        jobs = queue.list()
        for job in jobs:
            if known.get(job.id) != job.state:
                known[job.id] = job.state
                get_logger().info("%s: %s%s", job.id, job.state, job.reason and f" ({job.reason})")
        return bool(received) or (options.until_empty and all(job.state in ENDS for job in jobs))

    slots = parse_slots(options.slots)
    with (
        create_starter(is_warm=options.warm) as starter,
        Dispatcher(queue, slots, starter=starter) as dispatcher,
    ):
        dispatcher.run(look)
    if received or not options.until_empty:
        return 0
    return EXIT_FAILED if any(job.state == "failed" for job in queue.list()) else 0


def stop(queue: JobQueue, options: argparse.Namespace) -> int:
    """Make a run save and end."""
    return _show(queue.stop(options.job, getpass.getuser()), options)


def resume(queue: JobQueue, options: argparse.Namespace) -> int:
    """Continue a failed or stopped run from its last checkpoint."""
    return _show(queue.reopen(options.job, getpass.getuser()), options)


def log(queue: JobQueue, options: argparse.Namespace) -> int:
    """Print the end of a job's output."""
    text = queue.read_log(options.job)
    if options.json:
        print_json({"job": options.job, "log": text})
    else:
        sys.stdout.write(text)
    return 0


def _read_overrides(words: Sequence[str]) -> JsonObject:
    """Parse words such as `optim.lr=0.1`, with values in YAML; a UserError if that fails."""
    overrides: JsonObject = {}
    for word in words:
        key, sign, text = word.partition("=")
        key = key.removeprefix("--")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = sign = ""
        if not sign or not key:
            raise UserError(f"{word!r} is no KEY=VALUE; write it as optim.lr=0.1")
        if key in overrides:
            raise UserError(f"{key} is given twice; remove one of them")
        with contextlib.suppress(ValueError):  # YAML reads 1e-3 as a text
            value = float(value) if isinstance(value, str) else value
        overrides[key] = value
    return overrides


def _show(job: JobView, options: argparse.Namespace) -> int:
    if options.json:
        print_json(asdict(job))
    else:
        sys.stdout.write(f"{job.id}: {job.run} is {job.state}\n")
    return 0


_COMMANDS = {
    "submit": (submit, "queue a run, after the checks that main.py makes"),
    "run": (run, "start waiting jobs, and continue those that ended too early"),
    "list": (show_all, "the jobs, the oldest first"),
    "stop": (stop, "make a run save and end"),
    "resume": (resume, "continue a failed or stopped run"),
    "log": (log, "the end of a job's output"),
}

main = CommandLine(
    create_parser,
    run_command,
    logs=True,
    interrupted="interrupted: the runs continue; `python -m tools.queue run` finds them again",
)

if __name__ == "__main__":
    sys.exit(main())
