r"""Shows the output of the input pipeline: samples, throughput, and a contact sheet.

    python tools/test_tfds_loader.py --data-dir data --split train --num-samples 8 --time-it
    python tools/test_tfds_loader.py --data-dir data --save-grid sheet.png --views 6 \
        --train-pp "decode|resize(64)|randaug(2, 10)|value_range(-1, 1)"

The contact sheet has a row for each sample and a column for each epoch: the same example as
augmented for training.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    # Run by its path, this folder must make way: its names hide the library's.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from tools.loader.arguments import add_loader_arguments
from utils.programs import CommandLine, create_program_parser


def create_parser() -> argparse.ArgumentParser:
    """Create the parser of the flags."""
    parser = create_program_parser(__doc__)
    add_loader_arguments(parser)
    add = parser.add_argument
    add("--num-samples", type=int, default=8, help="samples to print and show (default 8)")
    add("--views", type=int, default=4, help="epochs of each sample on the sheet (default 4)")
    add("--save-grid", default="", metavar="PNG", help="where to save the contact sheet")
    add("--time-it", action="store_true", help="measure throughput")
    add("--num-loops", type=int, default=3, help="timed loops (default 3)")
    add("--loop-batches", type=int, default=50, help="batches of a timed loop (default 50)")
    add("--world-size", type=int, default=1, help="input processes (default 1)")
    add("--rank", type=int, default=0, help="which of them this is (default 0)")
    return parser


main = CommandLine(create_parser, "tools.loader.pipeline_check:run")

if __name__ == "__main__":
    sys.exit(main())
