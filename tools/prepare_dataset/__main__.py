"""Writes a dataset: scikit-learn's digits, any folder of class folders, or text as tokens.

    python -m tools.prepare_dataset digits --out data
    python -m tools.prepare_dataset folder photos --out data --name photos
    python -m tools.prepare_dataset text --from stdlib --tokenizer byte --out data

A dataset of images is read by this project, by `tfds.load(name, data_dir=...)` and
`builder_from_directory`. A broken-off run leaves finished files behind; the same command goes on
from there. The dataset's directory appears only when it is complete.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tools.prepare_dataset import digits, folder, text
from utils.programs import create_program_parser, run_program

# Each has `add_command(commands)`, which sets `prepare(arguments)`: it gives the line to print.
KINDS = (digits, folder, text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; the exit code."""
    arguments = create_parser().parse_args(argv)
    interrupted = "interrupted; the same command continues"
    return run_program(lambda: print(arguments.prepare(arguments)), interrupted=interrupted)


def create_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = create_program_parser(__doc__, prog="python -m tools.prepare_dataset")
    commands = parser.add_subparsers(required=True)
    for kind in KINDS:
        kind.add_command(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
