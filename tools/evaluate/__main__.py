"""Judges weights on one set of images or many, exactly, on any device and any number of ranks.

    python -m tools.evaluate runs/digits_student/first
    python -m tools.evaluate WEIGHTS --sets imagenet_v2 imagenet_real imagenet_a --data.root=/data
    python -m tools.evaluate WEIGHTS --sets eval noisy=mine@test --teacher TEACHER --out report
    python -m tools.evaluate WEIGHTS --probes knn fewshot linear --data.train_split=train[:10%]

WEIGHTS is a run's directory, a checkpoint, a file of weights, a shared model or the name of a timm
model. A set is `eval` or `test` (splits of the run's own dataset), a known one (imagenet,
imagenet_v2, imagenet_real, imagenet_a, imagenet_r, imagenet_sketch, imagenet_c), NAME=DATASET@SPLIT
of TFDS, or a mapping as in data.evals: '{name: x, source: folder, root: /data/x, split: test}'.
Without --sets and --probes those of the run's data.evals are judged, and eval.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.weights.flags import add_weights_flags
from utils.programs import CommandLine, create_program_parser

PROBES = ("knn", "fewshot", "linear")


def create_parser() -> argparse.ArgumentParser:
    """The tool's own flags; all others are keys of a configuration."""
    parser = create_program_parser(
        __doc__,
        prog="python -m tools.evaluate",
        epilog="All other flags are keys of a configuration, as for main.py: --data.root=DIR, "
        "--data.eval_batch_size=N, --runtime.device=cpu.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add_weights_flags(parser)
    add("--sets", nargs="+", metavar="SET", default=[], help="on what; see above")
    add("--config", default="", help="YAML that says how data are read; none: the run's own")
    add("--teacher", default="", metavar="WEIGHTS", help="judged beside it: agreement, and what "
        "each keeps of its score on the first set")  # fmt: skip
    add(
        "--flip", action="store_true", help="mean of the probabilities of an image and its mirror's"
    )
    add("--per-class", type=int, default=0, metavar="N", help="show the N worst classes of a set")
    add(
        "--worst", type=int, default=0, metavar="N",
        help="with --out: draw the N images of a set that the model is surest of and wrong about",
    )  # fmt: skip
    add("--probes", nargs="+", choices=PROBES, default=[], metavar="PROBE",
        help="read the features by knn, fewshot, linear: learnt on data.train_split, judged on "
        "data.eval_split, whose classes need not be the model's")  # fmt: skip
    add("--probe-epochs", type=int, default=30, metavar="N", help="of linear (default 30)")
    add("--json", action="store_true", help="the report as JSON on stdout, in place of tables")
    add("--out", type=Path, metavar="DIR", help="write report.json, tables (.csv) and pictures")
    return parser


main = CommandLine(create_parser, "tools.evaluate.judging:evaluate", takes_keys=True, logs=True)

if __name__ == "__main__":
    sys.exit(main())
