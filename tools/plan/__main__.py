"""Plans a run before it is paid for: hours and money on each slice, by memory, hosts and prices.

    python -m tools.plan configs/imagenet/vit_s16_90ep.yaml
    python -m tools.plan configs/imagenet/resnet50.yaml --budget 50 --preemptions-per-day 2
    python -m tools.plan configs/digits_student.yaml --slices v5litepod-8 v6e-8 --json

Nothing is compiled and no device is used. The time of a step is that of a finished run of the same
step in the store, else the compiler's verdict there, else counted FLOPs at the share of the peak
that published steps reach. Other flags are those of main.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from utils.programs import CommandLine, create_program_parser


def create_parser() -> argparse.ArgumentParser:
    """Create the command line; all other flags are keys of the run's configuration."""
    parser = create_program_parser(__doc__, prog="python -m tools.plan", allow_abbrev=False)
    add = parser.add_argument
    add("config", type=Path, metavar="CONFIG", help="the run's YAML")
    add("--slices", nargs="+", metavar="TYPE", help="accelerator types (default: all that fit)")
    add("--max-chips", type=int, default=32, help="of the slices that are tried (default 32)")
    add("--budget", type=float, metavar="USD", help="name what can be had for it")
    add("--store", metavar="DIR", help="runs, verdicts and prices.yaml (run.output_dir)")
    add("--prices", type=Path, metavar="FILE", help="your own prices (docs/store.md)")
    add("--region", default="", help="of the list prices (default: the cheapest for each term)")
    text = "of a spot slice (default: none, and the plan says so)"
    add("--preemptions-per-day", type=float, default=0.0, metavar="RATE", help=text)
    text = "wait for another machine (default: as in the store's runs, else 10)"
    add("--restart-minutes", type=float, help=text)
    text = "from a program's start to its next step (default: as in the store's runs, else 5)"
    add("--resume-minutes", type=float, help=text)
    add("--cpu-ms", type=float, metavar="MS", help="CPU ms of an image on the host (docs/data.md)")
    text = "examples of the splits, for a dataset that is not here: train=1281167 eval=50000"
    add("--examples", nargs="+", default=[], metavar="ROLE=N", help=text)
    text = "another size of a dataset that is not here, such as num_classes=1000"
    add("--assume", nargs="+", default=[], metavar="NAME=N", help=text)
    add("--seed", type=int, default=0, help="of the simulated preemptions")
    add("--json", action="store_true", help="one object for programs")
    return parser


main = CommandLine(create_parser, "tools.plan.planning:run", takes_keys=True)

if __name__ == "__main__":
    sys.exit(main())
