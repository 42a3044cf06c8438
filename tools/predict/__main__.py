"""What a model says of every image below a folder, as a table.

    python -m tools.predict runs/digits_student/RUN photos --top-k 5 --out answers.csv
    python -m tools.predict hf-hub:timm/resnet18.a1_in1k photos --embed --out answers.parquet

Each image is prepared as the run prepared those it was evaluated on (--pp says otherwise). The
table has a row a file: its path below the folder, the likeliest classes with number, name and
probability, with --embed the features in front of the head, and, where a file could not be read
or its answer is not finite, why. A model without a classifier, as a label-free run leaves it, has
features alone.
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
    """The command line."""
    parser = create_program_parser(__doc__, prog="python -m tools.predict")
    add_weights_flags(parser)
    add = parser.add_argument
    add("folder", metavar="FOLDER", help="images, and folders of images; or one image")
    add("--out", type=Path, required=True, help=f"the table, {', '.join(ENDINGS)}")
    add("--top-k", type=int, default=5, metavar="K", help="likeliest classes of a row (5)")
    add("--embed", action="store_true", help="add the features in front of the head")
    add("--batch-size", type=int, default=64, metavar="B", help="images at once (64)")
    add("--device", default="auto", choices=("auto", *DEVICES), help="where (auto)")
    add("--precision", default="fp32", choices=("fp32", "bf16"), help="of products (fp32)")
    return parser


main = CommandLine(create_parser, "tools.predict.predictions:predict", logs=True)

if __name__ == "__main__":
    sys.exit(main())
