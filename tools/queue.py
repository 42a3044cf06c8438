"""Runs that wait for a device of this machine, and outlive the program that started them.

    python -m tools.queue submit configs/digits_student.yaml optim.lr=0.002 train.seed=1
    python -m tools.queue run --slots 2
    python -m tools.queue list
    python -m tools.queue stop first-0123456789

`run` starts jobs in their order, as many at once as it has slots, and goes on with those that a
preemption or a crash has ended, as `train/supervise.sh` does. It may be ended at any time: the runs
go on, and the next `run` finds them. `stop` has a run save and end; `resume` has it go on.
"""

from __future__ import annotations

import argparse
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
    """The tool's flags."""
    parser = create_program_parser(__doc__, prog="python -m tools.queue")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    made = {}
    for name, (function, text) in _COMMANDS.items():
        made[name] = commands.add_parser(name, help=text, description=text)
        made[name].set_defaults(command=function)
        made[name].add_argument("--store", default="runs", help="root of the runs (runs)")
        made[name].add_argument("--json", action="store_true", help="one object for programs")
    made["submit"].add_argument("config", metavar="CONFIG", help="as --config of main.py")
    made["submit"].add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="on top of it")
    made["submit"].add_argument("--job-slots", type=int, default=1, help="that it holds (1)")
    made["run"].add_argument("--slots", default="1", help="jobs at once, or cuda:0,cuda:1,cpu (1)")
    made["run"].add_argument("--until-empty", action="store_true", help="end when no job is left")
    text = "fork runs on the CPU from a program that has imported all"
    made["run"].add_argument("--warm", action="store_true", help=text)
    for name in ("stop", "resume", "log"):
        made[name].add_argument("job", metavar="JOB", help="its id, as `list` shows it")
    return parser


def _open(options: argparse.Namespace) -> JobQueue:
    """The queue of the store; only a submission begins one.

    Raises:
      UserError: there is no such store.
    """
    if options.command is not submit:
        check_store(options.store)
    return open_queue(options.store)


def submit(queue: JobQueue, options: argparse.Namespace) -> int:
    """Queue a run, after the checks that main.py makes."""
    try:
        submission = Submission(
            config=options.config, overrides=_read_overrides(options.overrides),
            slots=options.job_slots,
        )  # fmt: skip
    except ValidationError as error:
        raise UserError(
            f"--job-slots ({options.job_slots}) lies outside 1 to 64; give the devices that the "
            "run needs"
        ) from error
    checker = Checker()
    try:
        verdict = checker.check(submission, queue.store)
    finally:
        checker.close()
    if verdict.error:
        raise UserError(verdict.error)
    return _show(queue.submit(submission, getpass.getuser()), options)


def show_all(queue: JobQueue, options: argparse.Namespace) -> int:
    """The jobs, the oldest first."""
    jobs = queue.list()
    if options.json:
        print_json({"jobs": [asdict(job) for job in jobs]})
        return 0
    table = create_table("job", "run", "state", "attempts>", "submitted", "reason")
    for job in jobs:
        table.add_row(job.id, job.run, colour_word(job.state), str(job.attempts),
                      format_time(job.created), job.reason or "-")  # fmt: skip
    if jobs:
        create_console().print(table)
    else:
        sys.stdout.write(f"{queue.folder} holds no job\n")
    return 0


def run(queue: JobQueue, options: argparse.Namespace) -> int:
    """Start what waits and go on with what ended too early, until this is ended."""
    known: dict[str, str] = {}
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    # A shell starts `... run &` of a script with SIGINT ignored: who sends it means it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def look() -> bool:
        jobs = queue.list()
        for job in jobs:
            if known.get(job.id) != job.state:
                known[job.id] = job.state
                get_logger().info("%s: %s%s", job.id, job.state, job.reason and f" ({job.reason})")
        return bool(asked) or (options.until_empty and all(job.state in ENDS for job in jobs))

    slots = parse_slots(options.slots)
    with (
        create_starter(is_warm=options.warm) as starter,
        Dispatcher(queue, slots, starter=starter) as dispatcher,
    ):
        dispatcher.run(look)
    if asked or not options.until_empty:
        return 0
    return EXIT_FAILED if any(job.state == "failed" for job in queue.list()) else 0


def stop(queue: JobQueue, options: argparse.Namespace) -> int:
    """Ask a run to save and end."""
    return _show(queue.stop(options.job, getpass.getuser()), options)


def resume(queue: JobQueue, options: argparse.Namespace) -> int:
    """Have a run that failed or was stopped go on from its last checkpoint."""
    return _show(queue.reopen(options.job, getpass.getuser()), options)


def log(queue: JobQueue, options: argparse.Namespace) -> int:
    """The end of what a job has printed."""
    text = queue.read_log(options.job)
    if options.json:
        print_json({"job": options.job, "log": text})
    else:
        sys.stdout.write(text)
    return 0


def _read_overrides(words: Sequence[str]) -> JsonObject:
    """`optim.lr=0.1` as YAML reads its value.

    Raises:
      UserError: no such form, or no YAML.
    """
    found: JsonObject = {}
    for word in words:
        key, sign, text = word.partition("=")
        key = key.removeprefix("--")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            sign = ""
        if not sign or not key:
            raise UserError(f"{word!r} is no KEY=VALUE; write it as optim.lr=0.1")
        if key in found:
            raise UserError(f"{key} is given twice; leave one of them out")
        # YAML takes 1e-3 for a text; whoever writes it in a flag means a number.
        found[key] = float(value) if isinstance(value, str) and _is_number(value) else value
    return found


def _is_number(text: str) -> bool:
    try:
        return bool(float(text)) or True
    except ValueError:
        return False


def _show(job: JobView, options: argparse.Namespace) -> int:
    if options.json:
        print_json(asdict(job))
    else:
        sys.stdout.write(f"{job.id}: {job.run} is {job.state}\n")
    return 0


_COMMANDS = {
    "submit": (submit, "queue a run, after the checks that main.py makes"),
    "run": (run, "start what waits, and go on with what ended too early"),
    "list": (show_all, "the jobs, the oldest first"),
    "stop": (stop, "ask a run to save and end"),
    "resume": (resume, "have one that failed or was stopped go on"),
    "log": (log, "the end of what a job has printed"),
}

main = CommandLine(
    create_parser,
    lambda options: options.command(_open(options), options),
    logs=True,
    interrupted="interrupted: the runs go on; `python -m tools.queue run` finds them again",
)

if __name__ == "__main__":
    sys.exit(main())
