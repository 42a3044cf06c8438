"""One model out of several: the mean of their weights.

    python -m tools.average runs/digits_student/A runs/digits_student/B --out mean
    python -m tools.average runs/digits_student/A runs/digits_student/B --method greedy --out mean
    python -m tools.average runs/digits_student/A --method ema --decay 0.9 --out mean

uniform gives all models equal weight. greedy (Wortsman et al. 2022, arXiv:2203.05482) evaluates
each on the run's data.eval_split, then adds them, the best first, as long as the mean does not
get worse; each evaluation takes every example once. ema gives later models more weight. A single
RUN stands for its checkpoints, in the order of their steps. Keys of the configuration may follow
for greedy: --data.root=DIR, --data.eval_split=SPLIT, --runtime.device=cpu.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from utils.programs import CommandLine, create_program_parser


def create_parser() -> argparse.ArgumentParser:
    """Create the parser."""
    epilog = "All other flags are keys of the run's configuration, for --method greedy."
    parser = create_program_parser(__doc__, prog="python -m tools.average", epilog=epilog)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="runs, checkpoints or files of weights of one model")
    add("--method", choices=("uniform", "greedy", "ema"), default="uniform")
    add("--decay", type=float, help="weight of all earlier models for ema (0.9)")
    add("--out", type=Path, required=True, help="directory for the export of the mean")
    return parser


main = CommandLine(
    create_parser, "tools.average.average_weights:average", takes_keys=True, logs=True
)

if __name__ == "__main__":
    sys.exit(main())
