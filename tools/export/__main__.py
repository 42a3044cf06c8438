"""Hands a model over to other programs, and proves that they give the same answers.

    python -m tools.export runs/digits_student/RUN --to onnx timm --out exported
    python -m tools.export local-dir:exported/timm --to stablehlo --normalize --out exported
    python -m tools.export runs/qwen3_5_sequences/RUN --to transformers --out exported

Each form is written below OUT, read back by what will serve it and asked about real images, whose
answers are compared with those of the model in PyTorch: `export.json` has the differences, and the
exit code is 1 where one exceeds --bound. Programs take any number of images, but for `stablehlo`,
which takes 8 at once; --batch-size fixes the number for all. `stablehlo_any` is StableHLO of any
number, by torchax and jax, which `bash run_commands.sh setup --jax-export` installs; savedmodel
needs neither: it holds the program of a fixed number and deals images out to it. `transformers` is
of language models (docs/delta.md): config.json and weights under the names of the Hub.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.weights.flags import add_weights_flags
from utils.programs import CommandLine, create_program_parser

# Those of `formats.FORMS`, and that of language models.
_FORMS = (
    "onnx",
    "torch_export",
    "timm",
    "stablehlo",
    "savedmodel",
    "stablehlo_any",
    "transformers",
)


def create_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = create_program_parser(__doc__, prog="python -m tools.export")
    add_weights_flags(parser)
    add = parser.add_argument
    add(
        "--to",
        nargs="+",
        required=True,
        choices=_FORMS,
        metavar="FORM",
        help=", ".join(_FORMS),
    )
    add("--out", type=Path, required=True, help="folder; each form has one of its own in it")
    add(
        "--normalize", action="store_true",
        help="take pixels of 0 to 255 and normalise inside; else the caller does",
    )  # fmt: skip
    add("--batch-size", type=int, metavar="B", help="fix it; none: any number of images")
    add("--images", default="", metavar="FOLDER", help="to compare on; none: two photographs")
    add("--count", type=int, default=16, metavar="N", help="images to compare on (16)")
    add("--bound", type=float, default=1e-4, help="largest difference of a number (1e-4)")
    return parser


main = CommandLine(create_parser, "tools.export.export_model:export", logs=True)

if __name__ == "__main__":
    sys.exit(main())
