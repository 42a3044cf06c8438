"""Ask a run's feature teachers about training images once and store their features' statistics.

`distill.standardise` brings features to one scale by them: mean, variances and the covariance's
eigenvectors of each teacher's pooled features and patches, over the images as the run's first
epoch sees them. Sums are made in float64 on the host and merged over ranks in their order.
"""

from __future__ import annotations

import argparse
import sys

from utils.programs import CommandLine, create_program_parser

_USUAL_IMAGES = 4096


def create_parser() -> argparse.ArgumentParser:
    """The tool's own flags; all others are keys of the run's configuration."""
    parser = create_program_parser(
        __doc__,
        prog="python -m tools.feature_statistics",
        epilog="All other flags are keys of the run's configuration, as for main.py.",
    )
    parser.add_argument("--config", required=True, help="YAML of the run that will be taught")
    parser.add_argument("--out", default="", help="file to write; none: distill.statistics")
    parser.add_argument(
        "--images", type=int, default=_USUAL_IMAGES,
        help=f"training images to look at, in whole batches; none: {_USUAL_IMAGES}, or an epoch",
    )  # fmt: skip
    return parser


main = CommandLine(
    create_parser, "tools.feature_statistics.measure_features:measure", takes_keys=True, logs=True
)

if __name__ == "__main__":
    sys.exit(main())
