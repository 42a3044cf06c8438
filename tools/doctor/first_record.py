"""Reads and decodes the first record of a dataset; prints a line of JSON.

python -m tools.doctor.first_record DATA_DIR [NAME]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from datasets import ImageBatch
from tools.loader.arguments import add_loader_arguments
from tools.loader.open_loader import plan_loader
from utils.programs import run_program

# A small image; its label and id stay.
_DECODE = "decode|resize(32)|value_range(-1, 1)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser()
    add_loader_arguments(parser)
    flags = ["--data-dir", words[0], "--batch", "1", "--train-pp", _DECODE, "--eval-pp", _DECODE]
    # A dataset may lack its number of classes: that is no fault of the machine.
    flags += ["--num-classes", "1000000", "--mode", "eval"]
    flags += ["--dataset", *words[1:2]] if words[1:] else []
    return run_program(show, parser.parse_args(flags))


def show(arguments: argparse.Namespace) -> None:
    """Open the loader and print its first example."""
    plan = plan_loader(arguments)
    loader = plan.open((0, 1))
    try:
        batch = next(iter(loader.batches()))
    finally:
        loader.close()
    assert isinstance(batch, ImageBatch) and batch.ids
    record = {"name": plan.title, "split": plan.split}
    record |= {"examples": loader.num_examples, "id": batch.ids[0], "label": int(batch.labels[0])}
    print(json.dumps(record))


if __name__ == "__main__":
    sys.exit(main())
