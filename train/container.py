"""Builds and runs the container image, on a TPU VM with the flags that its devices need.

    python -m train.container build --tpu
    python -m train.container run --tpu --data /data --output runs -- main.py --config C

The image's program is Python; what comes after -- are its arguments.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from train import commands
from train.execute import Executor
from train.xla_dist import split_command
from utils.errors import UserError
from utils.programs import create_program_parser, run_program

_HOME = "/home/trainer"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; the exit code."""
    flags, words = split_command(sys.argv[1:] if argv is None else argv)
    arguments = create_parser().parse_args(flags)
    verbs = {"build": build, "run": run}
    executor = Executor(dry_run=arguments.dry_run)
    return run_program(verbs[arguments.verb], arguments, words, executor)


def create_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = create_program_parser(__doc__, prog="python -m train.container")
    add = parser.add_argument
    add("verb", choices=("build", "run"))
    add("--tpu", action="store_true", help="with libtpu, and with a TPU VM's devices")
    add("--image", default="trainer", help="name of the image (default trainer)")
    add("--data", default="", help="directory with datasets, read-only in the container as data/")
    add("--output", default="", help="directory for results, in the container as runs/")
    add("--dry-run", action="store_true", help="print the command instead of running it")
    return parser


def build(arguments: argparse.Namespace, _: Sequence[str], executor: Executor) -> int:
    """Build the image; the exit code is docker's."""
    return executor.call(commands.build_image(arguments.image, tpu=arguments.tpu))


def run(arguments: argparse.Namespace, words: Sequence[str], executor: Executor) -> int:
    """Run Python in the image; the exit code is the program's.

    Raises:
      UserError: no program, or a directory that is not there.
    """
    if not words:
        raise UserError("there is no program; write it after --, such as -- main.py --help")
    mounts = {}
    if arguments.data:
        mounts[arguments.data] = f"{_HOME}/data:ro"
    if arguments.output:
        mounts[arguments.output] = f"{_HOME}/runs"
    for path in mounts:
        if not executor.dry_run and not Path(path).is_dir():
            raise UserError(f"{path!r} is no directory; docker would make it, owned by root")
    mounts = {str(Path(path).absolute()): there for path, there in mounts.items()}
    command = commands.run_image(arguments.image, words, tpu=arguments.tpu, mounts=mounts)
    return executor.call(command)


if __name__ == "__main__":
    sys.exit(main())
