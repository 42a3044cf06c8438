"""The same model on two backends, layer by layer: which layer is the first to differ?

    python -m proofs.parity runs/digits_student/RUN --a cpu --b xla
    python -m proofs.parity vit_small_patch16_224.augreg_in1k --a cpu --b cuda:bf16 --images photos

Both sides see the same images. `drift` is how far a layer's output has come apart since the
images, `own` what the layer alone adds: side B's layer is given the inputs of side A's. Both are
the largest difference over the largest value. The first layer whose own difference exceeds
--tolerance is named, and the exit code is 1. XLA means the TPU where there is one, with the patches
that a run there has.
"""

from __future__ import annotations

import argparse
import sys

from tools.weights.flags import add_weights_flags
from utils.programs import CommandLine, create_program_parser


def create_parser() -> argparse.ArgumentParser:
    """Create the command line."""
    parser = create_program_parser(__doc__, prog="python -m proofs.parity")
    add_weights_flags(parser)
    add = parser.add_argument
    side = "cpu, cuda, xla, each perhaps with :bf16"
    add("--a", default="cpu", metavar="BACKEND", help=f"what is held to be right: {side} (cpu)")
    add("--b", required=True, metavar="BACKEND", help="what is looked at: the same words")
    add("--tolerance", type=float, default=1e-4, help="largest own difference, relative (1e-4)")
    add("--images", default="", metavar="FOLDER", help="to look at (default: two photographs)")
    add("--count", type=int, default=4, metavar="N", help="images (4)")
    add("--no-patches", action="store_true", help="leave the model on XLA as timm wrote it")
    add("--all", action="store_true", help="show every layer, not those beyond the tolerance")
    return parser


main = CommandLine(create_parser, "proofs.parity.layer_parity:compare", logs=True)

if __name__ == "__main__":
    sys.exit(main())
