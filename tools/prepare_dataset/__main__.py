"""Writes a dataset: digits, fonts, MNIST, what TFDS can fetch, a folder, text, smaller images.

    python -m tools.prepare_dataset digits --out data
    python -m tools.prepare_dataset fonts --out data
    python -m tools.prepare_dataset mnist --from mnist_files --out data
    python -m tools.prepare_dataset tfds cifar10 --root data --allow-download
    python -m tools.prepare_dataset folder photos --out data --name photos
    python -m tools.prepare_dataset resize imagenet2012 --root data --short-side 256
    python -m tools.prepare_dataset text --from stdlib --tokenizer byte --out data
    python -m tools.prepare_dataset california_housing --root data --allow-download

A dataset of images can be read by this project, by `tfds.load(name, data_dir=...)` and by
`builder_from_directory`. After an interruption the same command continues with the next file. The
dataset's directory appears only when it is complete.
"""

from __future__ import annotations

import argparse
import os
import sys

from tools.prepare_dataset import (
    california_housing,
    digits,
    folder,
    fonts,
    mnist,
    resize,
    text,
    tfds,
)
from utils.programs import CommandLine, create_program_parser

# Each has `add_command(commands)`, which sets `prepare(arguments)`: it returns the line to print.
KINDS = (digits, fonts, mnist, tfds, folder, resize, text, california_housing)


def prepare(options: argparse.Namespace) -> None:
    """Write the dataset and print its path."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # its notices of CPU instructions
    print(options.prepare(options))


def create_parser() -> argparse.ArgumentParser:
    """Create the parser of the flags."""
    parser = create_program_parser(__doc__, prog="python -m tools.prepare_dataset")
    commands = parser.add_subparsers(required=True)
    for kind in KINDS:
        kind.add_command(commands)
    return parser


main = CommandLine(create_parser, prepare, interrupted="interrupted; the same command continues")

if __name__ == "__main__":
    sys.exit(main())
