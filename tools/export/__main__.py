"""Exports a model for other programs, and checks that its outputs stay the same.

    python -m tools.export runs/digits_student/RUN --to onnx timm --out exported
    python -m tools.export local-dir:exported/timm --to stablehlo --normalize --out exported
    python -m tools.export runs/qwen3_5_sequences/RUN --to transformers --out exported

Each form is written below OUT and read back by the library that will serve it; its outputs for real
images are compared with those of the model in PyTorch. `export.json` has the differences, and the
exit code is 1 if one exceeds --bound. Programs take any number of images, except `stablehlo`, which
takes 8 at once; --batch-size fixes the number for all. `stablehlo_any` is StableHLO of any number,
by torchax and jax, which `bash run_commands.sh setup --jax-export` installs; savedmodel needs
neither: it splits images into batches of a fixed number. `transformers` is of language models
(docs/delta.md): config.json and weights under the names of the Hub.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.weights.flags import add_weights_flags
from utils.programs import CommandLine, create_program_parser

# Those of `formats.FORMS`, and that of language models.
_FORMS = ("onnx", "torch_export", "timm", "stablehlo", "savedmodel", "stablehlo_any")
_FORMS += ("transformers",)


def create_parser() -> argparse.ArgumentParser:
    """Create the parser of the flags."""
    parser = create_program_parser(__doc__, prog="python -m tools.export")
    add_weights_flags(parser)
    add = parser.add_argument
    forms = ", ".join(_FORMS)
    add("--to", nargs="+", required=True, choices=_FORMS, metavar="FORM", help=forms)
    add("--out", type=Path, required=True, help="folder; each form gets a subfolder")
    text = "take pixels of 0 to 255 and normalise inside; else the caller does"
    add("--normalize", action="store_true", help=text)
    add("--batch-size", type=int, metavar="B", help="fix it (default: any number of images)")
    add("--images", default="", metavar="FOLDER", help="to compare on (default: two photographs)")
    add("--count", type=int, default=16, metavar="N", help="images to compare on (16)")
    add("--bound", type=float, default=1e-4, help="largest difference of a number (1e-4)")
    return parser


main = CommandLine(create_parser, "tools.export.export_model:export", logs=True)

if __name__ == "__main__":
    sys.exit(main())
