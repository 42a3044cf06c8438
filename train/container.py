"""Builds and runs the container image, on a TPU VM with the flags that its devices need.

    python -m train.container build --tpu
    python -m train.container run --tpu --data /data --output runs -- main.py --config C

The image's program is Python; the words after -- are its arguments.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from train import commands
from train.execute import Executor
from train.xla_dist import add_stack
from utils.errors import UserError
from utils.programs import CommandLine, create_program_parser

_HOME = "/home/trainer"


def create_parser() -> argparse.ArgumentParser:
    """Create the parser of the command line."""
    parser = create_program_parser(__doc__, prog="python -m train.container")
    add = parser.add_argument
    add("verb", choices=("build", "run"))
    add("--tpu", action="store_true", help="with libtpu, and with a TPU VM's devices")
    add_stack(parser)
    add("--image", default="trainer", help="name of the image (default trainer)")
    add("--data", default="", help="directory with datasets, read-only in the container as data/")
    add("--output", default="", help="directory for results, in the container as runs/")
    add("--dry-run", action="store_true", help="print the command instead of running it")
    return parser


def run_verb(arguments: argparse.Namespace) -> int:
    """Build the image or run a program in it; return the exit code of docker or the program."""
    executor = Executor(dry_run=arguments.dry_run)
    if arguments.verb == "build":
        return executor.call(
            commands.build_image(arguments.image, tpu=arguments.tpu, stack=arguments.stack)
        )
    if not arguments.command:
        raise UserError("there is no program; write it after --, such as -- main.py --help")
    targets = {arguments.data: f"{_HOME}/data:ro", arguments.output: f"{_HOME}/runs"}
    mounts: dict[str, str] = {}
    for path, target in targets.items():
        if path and not executor.dry_run and not Path(path).is_dir():
            raise UserError(f"{path!r} is no directory; docker would create it, owned by root")
        mounts |= {str(Path(path).absolute()): target} if path else {}
    return executor.call(
        commands.run_image(
            arguments.image,
            arguments.command,
            tpu=arguments.tpu,
            mounts=mounts,
            stack=arguments.stack,
        )
    )


main = CommandLine(create_parser, run_verb, takes_command=True)

if __name__ == "__main__":
    sys.exit(main())
