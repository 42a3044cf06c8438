"""Sends runs to MLflow, Weights & Biases or trackio: `python -m tools.mirror --to NAME RUN...`.

    python -m tools.mirror --to mlflow --place sqlite:///mlflow.db runs/digits_kd/student
    python -m tools.mirror --to wandb --follow digits_kd/student

The trainer knows nothing of it: this is a program of its own, in an environment of its own
(`bash run_commands.sh mirrors`), and may be killed at any instant. It sends what the run can not
take back any more, which is all up to its newest checkpoint, and the rest when it is complete: so
no point is there twice, and none is missing in the end. Where the target does not answer it tries
again for ever. A RUN is a directory, a URL or `experiment/name` of the store.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import signal
import sys
import time
from types import FrameType

from store.query.record import RunRecord
from tools.mirror.cursor import CursorFile, get_state_folder
from tools.mirror.feed import Feed, Standing
from tools.mirror.target import Tracker
from utils.errors import EXIT_TERMINATED, UserError
from utils.log import get_logger
from utils.programs import CommandLine, create_program_parser
from utils.storage.folder import Folder
from utils.storage.places import is_remote, join_path_or_url, open_folder

TARGETS = {"mlflow": "MlflowTarget", "wandb": "WandbTarget", "trackio": "TrackioTarget"}
_LONGEST_S = 60.0


def create_parser() -> argparse.ArgumentParser:
    """The tool's flags."""
    parser = create_program_parser(__doc__, prog="python -m tools.mirror")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="directory, URL or experiment/name")
    parser.add_argument("--to", required=True, choices=sorted(TARGETS), help="the tracker")
    parser.add_argument(
        "--place", default="", metavar="PLACE",
        help="of MLflow its URI ($MLFLOW_TRACKING_URI, or sqlite:///mlflow.db); of the others a "
        "directory (wandb; trackio's own)",
    )  # fmt: skip
    parser.add_argument("--store", default="runs", help="run.output_dir: directory or URL")
    parser.add_argument("--follow", action="store_true", help="go on until the runs are complete")
    parser.add_argument(
        "--live", action="store_true",
        help="send lines behind the newest checkpoint, too: those that the run takes back will be "
        "there twice",
    )  # fmt: skip
    parser.add_argument(
        "--every", type=float, default=30.0, metavar="SECONDS", help="between two looks (30)"
    )
    parser.add_argument(
        "--state", default="", metavar="DIR",
        help="where is kept how far was sent ($XDG_STATE_HOME/trainer/mirror)",
    )  # fmt: skip
    return parser


def mirror(options: argparse.Namespace) -> None:
    """Send runs to a target, once or until they are complete.

    Raises:
      UserError: a run is not there, the client is not installed, or another mirror is at work.
    """
    if not options.every > 0:
        raise UserError(f"--every ({options.every}) must be above 0")
    found = importlib.util.find_spec(options.to)
    if found is None or found.origin is None:  # a mere directory of that name
        raise UserError(
            f"--to {options.to}: its client is not installed here; `bash run_commands.sh mirrors` "
            "makes an environment with it, .venv-mirrors/bin/python"
        )
    folders = [_find_run(name, options.store) for name in options.runs]
    signal.signal(signal.SIGTERM, _end)
    with contextlib.ExitStack() as stack:
        feeds = [_create_feed(folder, options, stack) for folder in folders]
        while True:
            feeds = [feed for feed in feeds if not _advance(feed).is_done]
            if not (feeds and options.follow):
                return
            time.sleep(options.every)


def _create_feed(folder: Folder, options: argparse.Namespace, stack: contextlib.ExitStack) -> Feed:
    place = options.place and (
        options.place if "://" in options.place else str(open_folder(options.place).place)
    )
    cursor = CursorFile(get_state_folder(options.state), options.to, place, str(folder))
    stack.enter_context(cursor.hold())
    feed = Feed(folder, create_target(options.to, options.place), cursor, live=options.live)
    stack.callback(feed.close)
    return feed


def create_target(name: str, place: str) -> Tracker:
    """One run's target; its client is imported when it is opened."""
    module = importlib.import_module(f"tools.mirror.targets.{name}")
    return getattr(module, TARGETS[name])(place)


def _advance(feed: Feed) -> Standing:
    """One pass, tried for ever."""
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
            "`python -m tools.runs list` shows what is there"
        )
    return RunRecord(place).folder


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(EXIT_TERMINATED)


main = CommandLine(create_parser, mirror)

if __name__ == "__main__":
    sys.exit(main())
