"""Sends runs to MLflow, Weights & Biases or trackio: `python -m tools.mirror --to NAME RUN...`.

    python -m tools.mirror --to mlflow --place sqlite:///mlflow.db runs/digits_kd/student
    python -m tools.mirror --to wandb --follow digits_kd/student

This is a separate program. The trackers' clients, of which the trainer needs none, come by
`bash run_commands.sh mirrors`. It may be killed at any instant. It sends what the run cannot take
back any more, which is all up to its newest checkpoint, and the rest when it is complete: so no
point is sent twice, and none is missing in the end. It retries for ever if the tracker does not
respond. A RUN is a directory, a URL or `experiment/name` of the store.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import sys
import time

from store.query.record import RunRecord
from tools.mirror.cursor import CursorFile
from tools.mirror.feed import Feed, Standing
from utils.errors import EXIT_TERMINATED, UserError
from utils.log import get_logger
from utils.programs import CommandLine, create_program_parser
from utils.registry import load_object
from utils.storage.folder import Folder
from utils.storage.installation import PRODUCT
from utils.storage.places import is_remote, join_path_or_url, open_folder, to_path

TARGETS = {"mlflow": "MlflowTarget", "wandb": "WandbTarget", "trackio": "TrackioTarget"}
_LONGEST_S = 60.0


def create_parser() -> argparse.ArgumentParser:
    """Create the parser."""
    parser = create_program_parser(__doc__, prog="python -m tools.mirror")
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="directory, URL or experiment/name")
    add("--to", required=True, choices=sorted(TARGETS), help="the tracker")
    place = "of MLflow its URI ($MLFLOW_TRACKING_URI, or sqlite:///mlflow.db); of the others a "
    place += "directory (wandb; trackio's own)"
    add("--place", default="", metavar="PLACE", help=place)
    add("--store", default="runs", help="run.output_dir: directory or URL")
    add("--follow", action="store_true", help="go on until the runs are complete")
    live = (
        "also send lines after the newest checkpoint: those that the run takes back will be sent "
    )
    live += "twice"
    add("--live", action="store_true", help=live)
    add("--every", type=float, default=30.0, metavar="SECONDS", help="between two passes (30)")
    state = "directory that keeps what was sent ($XDG_STATE_HOME/tpudistil/mirror)"
    add("--state", default="", metavar="DIR", help=state)
    return parser


def mirror(options: argparse.Namespace) -> None:
    """Send runs to a tracker, once or until they are complete."""
    if not options.every > 0:
        raise UserError(f"--every ({options.every}) must be above 0")
    spec = importlib.util.find_spec(options.to)
    if spec is None or spec.origin is None:  # a mere directory of that name
        raise UserError(
            f"--to {options.to}: its client is not installed; run bash run_commands.sh mirrors, "
            "and this program by .venv-mirrors/bin/python"
        )
    folders = [_find_run(name, options.store) for name in options.runs]
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(EXIT_TERMINATED))
    with contextlib.ExitStack() as stack:
        feeds = [_create_feed(folder, options, stack) for folder in folders]
        while True:
            feeds = [feed for feed in feeds if not _advance(feed).is_done]
            if not (feeds and options.follow):
                return
            time.sleep(options.every)


def _create_feed(folder: Folder, options: argparse.Namespace, stack: contextlib.ExitStack) -> Feed:
    place = options.place
    if place and "://" not in place:
        place = str(open_folder(place).place)
    # Not in a cache: cursors must outlive it.
    state = options.state or os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    state_folder = to_path(state, "--state")
    if not options.state:
        former = state_folder / "trainer/mirror"  # before the program had its name
        state_folder = former if former.is_dir() else state_folder / PRODUCT / "mirror"
    cursor = CursorFile(state_folder, options.to, place, str(folder))
    stack.enter_context(cursor.hold())
    target = load_object(f"tools.mirror.targets.{options.to}:{TARGETS[options.to]}")
    feed = Feed(folder, target(options.place), cursor, live=options.live)
    stack.callback(feed.close)
    return feed


def _advance(feed: Feed) -> Standing:
    """Make one pass, retried until it succeeds."""
    pause_s = 1.0
    while True:
        try:
            progress = feed.advance()
            break
        except Exception as error:  # each client has errors of its own
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            get_logger().warning(
                "%s could not be sent: %s; next try in %.0f s", feed.folder, reason, pause_s
            )
            with contextlib.suppress(Exception):
                feed.close()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_S)
    rest = "; all of it" if progress.is_done else f"; {progress.waiting} wait for a checkpoint"
    print(f"{feed.folder}: {progress.lines} lines are there{rest}", flush=True)
    return progress


def _find_run(name: str, store: str) -> Folder:
    if is_remote(name) or open_folder(name).is_there():
        return RunRecord(name).folder
    place = join_path_or_url(store, *name.split("/"))
    if not open_folder(place).is_there():
        raise UserError(
            f"RUN {name!r} is neither a directory nor experiment/name below --store {store!r}; "
            "`python -m tools.runs list` lists all runs"
        )
    return RunRecord(place).folder


main = CommandLine(create_parser, mirror)

if __name__ == "__main__":
    sys.exit(main())
