"""Computes statistics of the features of a run's teachers over training images, and stores them.

`distill.standardise` brings features to one scale by them: mean, variances and the covariance's
eigenvectors of each teacher's pooled features and patches, over the images of the run's first
epoch. Sums are made in float64 on the host and merged over ranks in their order.
"""

from __future__ import annotations

import argparse
import sys

from utils.programs import CommandLine, create_program_parser


def create_parser() -> argparse.ArgumentParser:
    """Create the parser of the tool's own flags; all others are keys of the run's configuration."""
    parser = create_program_parser(
        __doc__,
        prog="python -m tools.feature_statistics",
        epilog="All other flags are keys of the run's configuration, as for main.py.",
    )
    parser.add_argument("--config", required=True, help="YAML of the run that will be distilled")
    parser.add_argument("--out", default="", help="file to write (default: distill.statistics)")
    text = "training images, in whole batches, at most an epoch (default %(default)s)"
    parser.add_argument("--images", type=int, default=4096, help=text)
    return parser


main = CommandLine(
    create_parser, "tools.feature_statistics.measure_features:measure", takes_keys=True, logs=True
)

if __name__ == "__main__":
    sys.exit(main())
