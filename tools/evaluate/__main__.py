"""Evaluates weights on sets of images, exactly, on any device and any number of ranks.

    python -m tools.evaluate runs/digits_student/first
    python -m tools.evaluate WEIGHTS --sets imagenet_v2 imagenet_real imagenet_a --data.root=/data
    python -m tools.evaluate WEIGHTS --sets eval noisy=mine@test --teacher TEACHER --out report
    python -m tools.evaluate WEIGHTS --probes knn fewshot linear --data.train_split=train[:10%]

WEIGHTS is a run's directory, a checkpoint, a file of weights, a shared model or the name of a timm
model. A set is `eval` or `test` (splits of the run's own dataset), a known one (imagenet,
imagenet_v2, imagenet_real, imagenet_a, imagenet_r, imagenet_sketch, imagenet_c), NAME=DATASET@SPLIT
of TFDS, or a mapping as in data.evals: '{name: x, source: folder, root: /data/x, split: test}'.
Without --sets and --probes, eval and the run's data.evals are evaluated.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.weights.flags import add_weights_flags
from utils.programs import CommandLine, create_program_parser

PROBES = ("knn", "fewshot", "linear")


def create_parser() -> argparse.ArgumentParser:
    """Create the parser of the tool's own flags; all others are keys of a configuration."""
    parser = create_program_parser(
        __doc__,
        prog="python -m tools.evaluate",
        epilog="All other flags are keys of a configuration, as for main.py: --data.root=DIR, "
        "--data.eval_batch_size=N, --runtime.device=cpu.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add_weights_flags(parser)
    add("--sets", nargs="+", metavar="SET", default=[], help="sets of images; see above")
    add("--config", default="", help="YAML of how data are read (default: the run's own)")
    text = "evaluate it too: agreement, and the share of the first set's score kept on the others"
    add("--teacher", default="", metavar="WEIGHTS", help=text)
    add("--flip", action="store_true", help="average the probabilities of image and mirror image")
    add("--per-class", type=int, default=0, metavar="N", help="show the N worst classes of a set")
    text = "with --out: draw the N images of a set that are wrong with the highest confidence"
    add("--worst", type=int, default=0, metavar="N", help=text)
    text = (
        "probes of the features: knn, fewshot, linear; they learn on data.train_split and are "
        "evaluated on data.eval_split, whose classes need not be the model's"
    )
    add("--probes", nargs="+", choices=PROBES, default=[], metavar="PROBE", help=text)
    add("--probe-epochs", type=int, default=30, metavar="N", help="epochs of linear (default 30)")
    add("--json", action="store_true", help="print the report as JSON instead of tables")
    add("--out", type=Path, metavar="DIR", help="write report.json, tables (.csv) and pictures")
    return parser


main = CommandLine(
    create_parser, "tools.evaluate.evaluate_sets:evaluate", takes_keys=True, logs=True
)

if __name__ == "__main__":
    sys.exit(main())
