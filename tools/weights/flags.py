"""The flags by which programs name weights."""

from __future__ import annotations

import argparse

WEIGHTS_KEY = "WEIGHTS"


def add_weights_flags(parser: argparse.ArgumentParser) -> None:
    """WEIGHTS, and what is said of them where they do not say it themselves."""
    add = parser.add_argument
    add(
        "weights", metavar=WEIGHTS_KEY,
        help="run, checkpoint, .safetensors, .pth, .npz, hf-hub:NAME, local-dir:FOLDER, or the "
        "name of a timm model",
    )  # fmt: skip
    add("--model", default="", metavar="NAME", help="architecture, where the weights tell none")
    add("--model-args", default="", metavar="JSON", help="its arguments: '{\"img_size\": 32}'")
    add("--classes", type=int, metavar="K", help="its classes, where the weights tell none")
    add(
        "--names",
        default="",
        metavar="FILE",
        help="names of its classes, where the weights tell none: a name a line, or a JSON list",
    )
    add(
        "--pp", default="", metavar="STRING",
        help="preprocessing of an encoded image (docs/preprocessing.md); none: the run's own",
    )  # fmt: skip
