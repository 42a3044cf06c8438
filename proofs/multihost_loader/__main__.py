"""Proves that several input processes share a dataset: every id once, and steady throughput.

    python -m proofs.multihost_loader --data-dir data --world-size 4
    # one process per host, reports in a directory that all hosts see, then the verdict:
    python -m proofs.multihost_loader ... --world-size 4 --rank $RANK --reports DIR
    python -m proofs.multihost_loader ... --world-size 4 --reports DIR --check

An ordered pass must show every id once. A training epoch must show no id twice and as many as its
batches hold. Exits with 1 if the verdict is FAIL, with 2 if it cannot run.
"""

from __future__ import annotations

import argparse
import sys

from tools.loader.arguments import add_loader_arguments
from utils.programs import CommandLine, create_program_parser


def create_parser() -> argparse.ArgumentParser:
    """Create the parser of the flags."""
    parser = create_program_parser(__doc__, prog="python -m proofs.multihost_loader")
    add_loader_arguments(parser)
    add = parser.add_argument
    add("--world-size", type=int, default=2, help="input processes (default 2)")
    add("--rank", type=int, help="run this rank alone and write its report")
    add("--reports", default="", metavar="DIR", help="directory of the ranks' reports")
    add("--check", action="store_true", help="only check the reports that are there")
    add(
        "--min-throughput-ratio",
        type=float,
        default=0.0,
        help="slowest part of a rank's pass over its median part, at least (default: no gate)",
    )
    add(
        "--min-samples-per-sec",
        type=float,
        default=0.0,
        help="images per second of all ranks together, at least (default: no gate)",
    )
    add("--parts", type=int, default=8, help="parts of a pass that are timed (default 8)")
    return parser


main = CommandLine(create_parser, "proofs.multihost_loader.rank_reports:run")

if __name__ == "__main__":
    sys.exit(main())
