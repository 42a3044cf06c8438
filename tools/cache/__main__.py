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
from collections.abc import Sequence

from tools.cache import cutting, importing, looking, writing
from utils.log import setup_logging
from utils.programs import create_program_parser, run_program


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the commands; gives the exit code."""
    setup_logging()
    options, rest = parse_arguments(argv)
    interrupted = "interrupted; the same command continues"
    return run_program(lambda: options.run(options, rest), interrupted=interrupted)


def parse_arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The tool's own flags, and the rest, which are keys of a run's configuration."""
    parser = create_program_parser(__doc__, prog="python -m tools.cache")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    writing.add_command(commands)
    looking.add_commands(commands)
    cutting.add_commands(commands)
    importing.add_command(commands)
    options, rest = parser.parse_known_args(argv)
    if rest and not options.takes_keys:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return options, rest


if __name__ == "__main__":
    sys.exit(main())
