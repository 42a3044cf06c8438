"""Live numbers of a run: loss, score, throughput, input wait, memory, and the devices at work.

    python -m tools.monitor runs/mnist/RUN
    python -m tools.monitor runs/mnist --once

RUN is a run's directory or URL, or that of an experiment, whose newest run is taken. It reads the
run's files and never writes: a run that restarts is followed, one that is complete ends it. Duty
cycle and HBM come from tpu-info or NVML on the machine where the run is; elsewhere they are "not
there".
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live

from store.query.record import RunRecord
from store.record.ids import RUN_FILE
from store.record.runs import RunStore
from tools.monitor.view import create_view, describe_end, is_here
from utils.device_use import read_devices
from utils.errors import UserError
from utils.programs import create_program_parser, run_program
from utils.storage.folder import Folder, StorageError
from utils.storage.places import is_remote, open_folder

# Seconds between two looks: at files of this machine, and at those of a bucket.
_EVERY_S, _EVERY_REMOTE_S = 2.0, 15.0
_MOST_S = 86400.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; the exit code."""
    arguments = create_parser().parse_args(argv)
    return run_program(monitor, arguments, interrupted="the run goes on without its monitor")


def create_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = create_program_parser(__doc__, prog="python -m tools.monitor")
    parser.add_argument("run", metavar="RUN", help="a run's or an experiment's directory or URL")
    parser.add_argument("--once", action="store_true", help="print one table and end")
    parser.add_argument(
        "--every-s",
        type=float,
        metavar="S",
        help=f"seconds between two looks (default {_EVERY_S:g}; {_EVERY_REMOTE_S:g} for a URL)",
    )
    return parser


def monitor(arguments: argparse.Namespace) -> None:
    """Show the run until it is complete."""
    every_s = arguments.every_s
    if every_s is None:
        every_s = _EVERY_REMOTE_S if is_remote(arguments.run) else _EVERY_S
    if not 0 < every_s <= _MOST_S:
        raise UserError(
            f"--every-s ({every_s:g}) must lie between 0 and {_MOST_S:g}; leave it out for "
            f"{_EVERY_S:g}"
        )
    try:
        folder = find_run(arguments.run)
        record = RunRecord(folder)
        console = Console()
        if arguments.once or not console.is_terminal:
            console.print(show(record))
            return
        if record.is_complete:
            console.print(describe_end(record), highlight=False, soft_wrap=True)
            return
        follow(folder, record, console, every_s)
    except StorageError as error:
        raise UserError(f"RUN ({arguments.run}) cannot be read: {error}; try again") from error


def follow(folder: Folder, record: RunRecord, console: Console, every_s: float) -> None:
    """The table, drawn anew as often as asked, until the run is complete."""
    live = Live(show(record), console=console, auto_refresh=False)
    # Not `with live`: Ctrl-C while it starts would leave the terminal without its cursor.
    try:
        live.start(refresh=True)
        while not record.is_complete:
            time.sleep(every_s)
            record = look_again(folder, record)
            live.update(show(record), refresh=True)
    finally:
        live.stop()
    console.print(describe_end(record), highlight=False, soft_wrap=True)


def look_again(folder: Folder, record: RunRecord) -> RunRecord:
    """The run as it is now; as it was, where a file is just being replaced or out of reach."""
    try:
        return RunRecord(folder)
    except (UserError, StorageError):
        return record


def show(record: RunRecord) -> Group:
    """The table of this instant."""
    return create_view(record, read_devices() if is_here(record) else None, time.time())


def find_run(place: str) -> Folder:
    """The run that a directory or URL stands for.

    Raises:
      UserError: there is neither a run nor an experiment with one.
    """
    folder = open_folder(place)
    if folder.read_texts([RUN_FILE]):
        return folder
    names = [name for name in folder.list_names() if not name.startswith(".")]
    newest = None
    if names and any(folder.child(name).read_texts([RUN_FILE]) for name in names):
        newest = RunStore(str(folder.parent), folder.name).find_newest()
    if newest is None:
        reason = "is no directory" if not (names or folder.is_there()) else "holds no run"
        raise UserError(f"RUN ({place}) {reason}; give the directory of a run, such as runs/x/RUN")
    return open_folder(newest.place)


if __name__ == "__main__":
    sys.exit(main())
