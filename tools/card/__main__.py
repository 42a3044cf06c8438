"""Writes a model card from a run's files: what it is, how it was made, what it reaches.

    python -m tools.card runs/digits_student/RUN --out README.md
    python -m tools.card weights.pth --model resnet50 --out README.md

For weights that lie in no run the card describes the model and says that no more is known. Nothing
is guessed: licence and purpose are not in a run, and the card says so.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.weights.flags import add_weights_flags
from utils.programs import CommandLine, create_program_parser


def create_parser() -> argparse.ArgumentParser:
    """Create the parser."""
    parser = create_program_parser(__doc__, prog="python -m tools.card")
    add_weights_flags(parser)
    parser.add_argument("--out", type=Path, required=True, help="the Markdown file")
    return parser


main = CommandLine(create_parser, "tools.card.model_card:write", logs=True)

if __name__ == "__main__":
    sys.exit(main())
