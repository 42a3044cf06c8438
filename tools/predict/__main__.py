"""Writes a model's predictions for every image below a folder to a table.

    python -m tools.predict runs/digits_student/RUN photos --top-k 5 --out answers.csv
    python -m tools.predict hf-hub:timm/resnet18.a1_in1k photos --embed --out answers.parquet

Images are preprocessed as in the run's evaluations, or by --pp. The table has a row for each file:
its path below the folder, the likeliest classes with number, name and probability, with --embed the
features in front of the head, and the reason if a file cannot be read or its output is not finite.
A model without a classifier, such as that of a label-free run, gives only features.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.predict.table import ENDINGS
from tools.weights.flags import add_weights_flags
from utils.config.devices import DEVICES
from utils.programs import CommandLine, create_program_parser


def create_parser() -> argparse.ArgumentParser:
    """Create the parser of the flags."""
    parser = create_program_parser(__doc__, prog="python -m tools.predict")
    add_weights_flags(parser)
    add = parser.add_argument
    add("folder", metavar="FOLDER", help="images, and folders of images; or one image")
    add("--out", type=Path, required=True, help=f"the table, {', '.join(ENDINGS)}")
    add("--top-k", type=int, default=5, metavar="K", help="number of classes in a row (5)")
    add("--embed", action="store_true", help="add the features in front of the head")
    add("--batch-size", type=int, default=64, metavar="B", help="images at once (64)")
    add("--device", default="auto", choices=("auto", *DEVICES), help="device to run on (auto)")
    add("--precision", default="fp32", choices=("fp32", "bf16"), help="dtype of matmuls (fp32)")
    return parser


main = CommandLine(create_parser, "tools.predict.predictions:predict", logs=True)

if __name__ == "__main__":
    sys.exit(main())
