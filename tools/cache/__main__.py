"""Stores the answers of a run's teachers, and looks after what is stored.

    python -m tools.cache write --config configs/digits_kd.yaml --teacher_path TEACHER --out CACHE
    python -m tools.cache info CACHE
    python -m tools.cache verify CACHE
    python -m tools.cache merge CACHE OTHER --out BOTH
    python -m tools.cache subset CACHE --top-k 5 --augmentations 2 --dtype int8 --out SMALL
    python -m tools.cache import imagenet_plus FILES --config configs/x.yaml --out CACHE

Exit code 2: wrong use; 1: `verify` found what was not written so. `COMMAND --help` says more.
"""

from __future__ import annotations

import argparse
import sys

from tools.cache import cutting, importing, looking, writing
from utils.programs import CommandLine, create_program_parser


def create_parser() -> argparse.ArgumentParser:
    """The tool's commands."""
    parser = create_program_parser(__doc__, prog="python -m tools.cache")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    writing.add_command(commands)
    looking.add_commands(commands)
    cutting.add_commands(commands)
    importing.add_command(commands)
    return parser


main = CommandLine(create_parser, logs=True, interrupted="interrupted; the same command continues")

if __name__ == "__main__":
    sys.exit(main())
