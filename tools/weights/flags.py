"""The flags by which programs name weights."""

from __future__ import annotations

import argparse

WEIGHTS_KEY = "WEIGHTS"


def add_weights_flags(parser: argparse.ArgumentParser) -> None:
    """Add WEIGHTS, and flags for metadata that weights may lack."""
    add = parser.add_argument
    forms = "run, checkpoint, .safetensors, .pth, .npz, hf-hub:NAME, local-dir:FOLDER"
    add("weights", metavar=WEIGHTS_KEY, help=f"{forms}, or the name of a timm model")
    add("--model", default="", metavar="NAME", help="architecture, if the weights have none")
    add("--model-args", default="", metavar="JSON", help="its arguments: '{\"img_size\": 32}'")
    add("--classes", type=int, metavar="K", help="number of classes, if the weights have none")
    text = "names of the classes, one a line or a JSON list, if the weights have none"
    add("--names", default="", metavar="FILE", help=text)
    text = "preprocessing of an encoded image (docs/preprocessing.md; default: the run's own)"
    add("--pp", default="", metavar="STRING", help=text)
