"""What a TPU's compiler says of a run's training step, on a machine that has no TPU.

Traces the very step that the engine runs, compiles it with libtpu for the named slice and prints
whether it fits, what it should cost and where: compiler's estimates, not measurements.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    # It also runs by its path; then this folder, whose names hide the library's, must make way.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bill.targets import COMPILERS, list_targets
from store.quality.report_comparison import add_report_flags
from utils.programs import CommandLine, create_defaults_parser


def create_parser() -> argparse.ArgumentParser:
    """Create the command line; all other flags are keys of the run's configuration."""
    parser = create_defaults_parser(
        __doc__,
        prog="python -m tools.compile_for_tpu",
        epilog=f"Other flags are those of main.py, such as --optim.name=sgd. Targets: "
        f"{list_targets()}.",
    )
    add = parser.add_argument
    add("--config", type=Path, required=True, help="the run's YAML")
    add("--target", default="v5e:2x2", help="generation and slice, such as v5e:2x2 or v5p:2x2x1")
    add(
        "--compiler",
        choices=COMPILERS,
        default=COMPILERS[0],
        help="release of libtpu: own, the one of the run's stack, or newest",
    )
    add("--chips", type=int, default=1, help="devices to partition over (SPMD); 1: one device")
    add("--batch", type=int, help="examples on each device (default: global batch / devices)")
    add("--num-classes", type=int, help="classes, for a dataset that is not here")
    add(
        "--assume",
        metavar="NAME=NUMBER",
        action="append",
        default=[],
        help="another size of a dataset that is not here, such as vocab_size=32000 (default: none)",
    )
    add("--json", type=Path, help="write the report here")
    add("--hlo", type=Path, help="write the compiled program and the exported step here")
    add("--bundles", action="store_true", help="count the bundles of every operation, too")
    add("--micro-batches", action="store_true", help="find the cheapest train.accumulate_steps")
    add("--write", action="store_true", help="write what --micro-batches finds into --config")
    add("--max-batch", action="store_true", help="search the largest batch of a device that fits")
    add_report_flags(parser)
    add("--limit", type=float, metavar="MCYC", help="fail above this many Mcycles plus 5 %%")
    add("--time-limit", type=float, default=900.0, help="seconds that a compilation may take")
    add(
        "--cache-dir",
        type=Path,
        help="store of results (default: below the user's cache directory)",
    )
    return parser


main = CommandLine(create_parser, "bill.step_report:run", takes_keys=True)

if __name__ == "__main__":
    sys.exit(main())
