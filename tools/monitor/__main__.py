"""Live numbers of a run: loss, score, throughput, input wait, memory, and the devices at work.

    python -m tools.monitor runs/mnist/RUN
    python -m tools.monitor runs/mnist --once

RUN is a run's directory or URL, or that of an experiment, which stands for its newest run. The
monitor only reads the run's files, follows restarts and ends when the run is complete. Duty cycle
and HBM come from tpu-info or NVML on the machine of the run; elsewhere they are "not there".
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time

from rich.console import Console, Group
from rich.live import Live

from store.query.record import RunRecord
from store.record.ids import RUN_FILE
from store.record.runs import RunStore
from tools.monitor.view import create_view, describe_end, is_here
from utils.device_use import read_devices
from utils.errors import UserError
from utils.programs import CommandLine, create_program_parser
from utils.storage.folder import Folder, StorageError
from utils.storage.places import is_remote, open_folder

# Seconds between two reads of local files, and of those of a bucket.
_EVERY_S, _EVERY_REMOTE_S = 2.0, 15.0
_MOST_S = 86400.0


def create_parser() -> argparse.ArgumentParser:
    """Create the parser."""
    parser = create_program_parser(__doc__, prog="python -m tools.monitor")
    parser.add_argument("run", metavar="RUN", help="a run's or an experiment's directory or URL")
    parser.add_argument("--once", action="store_true", help="print one table and end")
    every = f"seconds between two reads (default {_EVERY_S:g}; {_EVERY_REMOTE_S:g} for a URL)"
    parser.add_argument("--every-s", type=float, metavar="S", help=every)
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
    """Draw the table again and again until the run is complete."""
    live = Live(show(record), console=console, auto_refresh=False)
    # Not `with live`: Ctrl-C while it starts would leave the terminal without its cursor.
    try:
        live.start(refresh=True)
        while not record.is_complete:
            time.sleep(every_s)
            # A file may just be replaced, or a bucket out of reach: then the table stays.
            with contextlib.suppress(UserError, StorageError):
                record = RunRecord(folder)
            live.update(show(record), refresh=True)
    finally:
        live.stop()
    console.print(describe_end(record), highlight=False, soft_wrap=True)


def show(record: RunRecord) -> Group:
    """Create the table as of now."""
    return create_view(record, read_devices() if is_here(record) else None, time.time())


def find_run(path: str) -> Folder:
    """Find the run of a directory or URL; UserError if it holds neither run nor experiment."""
    folder = open_folder(path)
    if folder.read_texts([RUN_FILE]):
        return folder
    names = [name for name in folder.list_names() if not name.startswith(".")]
    newest = None
    if names and any(folder.child(name).read_texts([RUN_FILE]) for name in names):
        newest = RunStore(str(folder.parent), folder.name).find_newest()
    if newest is None:
        reason = "is no directory" if not (names or folder.is_there()) else "holds no run"
        raise UserError(f"RUN ({path}) {reason}; give the directory of a run, such as runs/x/RUN")
    return open_folder(newest.place)


main = CommandLine(create_parser, monitor, interrupted="the run goes on without its monitor")

if __name__ == "__main__":
    sys.exit(main())
