"""Replays a step and names the first module whose outputs or gradients are not finite.

    python -m tools.replay runs/digits/first
    python -m tools.replay runs/digits/first --step 1234 --runtime.device cpu

A run with --train.keep_bad_step keeps the state, the batch and the draws of a step that ends it.
Without them, or for another --step, the steps since the last checkpoint are repeated. Nothing is
written. Further flags are keys of the configuration. Exit code 1: all numbers of the step are
finite here.
"""

from __future__ import annotations

import argparse
import sys

from utils.programs import CommandLine, create_program_parser


def create_parser() -> argparse.ArgumentParser:
    """Create the parser."""
    parser = create_program_parser(__doc__, prog="python -m tools.replay")
    add = parser.add_argument
    add("run", metavar="RUN", help="directory, experiment/name, name or id")
    add("--step", type=int, metavar="N", help="step to replay, from 0 (default: the kept one)")
    add("--store", default="runs", help="run.output_dir: directory or URL")
    add("--index", default="", metavar="URL", help="another database of the index")
    add("--json", action="store_true", help="for programs: every value that is not finite")
    return parser


main = CommandLine(create_parser, "tools.replay.replaying:replay", takes_keys=True, logs=True)

if __name__ == "__main__":
    sys.exit(main())
