"""Manages checkpoints: `python -m tools.checkpoint {list,verify,diff,export,prune} PLACE ...`.

PLACE is a run, its `checkpoints/` or a `step_...` directory, on a disk or behind a URL such as
gs://bucket/runs/digits/first. `list` and `diff` show, `verify` reads every tensor, `export` writes
weights for timm, `prune` deletes old checkpoints and never the last whole one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from utils.json_types import JsonObject
from utils.programs import CommandLine, create_program_parser


def create_parser() -> argparse.ArgumentParser:
    """Create the parser, with one parser for each command."""
    parser = create_program_parser(__doc__, prog="python -m tools.checkpoint")
    commands = parser.add_subparsers(required=True, metavar="{list,verify,diff,export,prune}")
    texts = {
        "list": "steps, sizes, which is best, which are broken",
        "verify": "read every tensor of every checkpoint",
        "diff": "tensors that differ, and by how much",
        "export": "weights as timm safetensors or as one .pth",
        "prune": "delete old checkpoints",
    }
    parsers = {name: commands.add_parser(name, help=text) for name, text in texts.items()}
    for name, command in parsers.items():
        command.set_defaults(run=f"tools.checkpoint.checkpoint_commands:{name}_checkpoints")
        if name != "diff":
            count: JsonObject = {"nargs": "+"} if name == "verify" else {}
            command.add_argument("place", metavar="PLACE", **count)
    add = parsers["diff"].add_argument
    add("first", metavar="A")
    add("second", metavar="B")
    add("--parts", default="", help="only these, such as model,ema (default: all)")
    add("--limit", type=int, default=40, help="tensors to name")
    add = parsers["export"].add_argument
    out = "FILE.safetensors, or FILE.pth: a dictionary with state_dict, arch and step; FILE.json "
    out += "beside it describes the model and its run"
    add("--out", type=Path, required=True, help=out)
    weights = "of that checkpoint: best is the first average of the weights if there is one, else "
    weights += "the model (default best); ema2 is the first of train.ema_more; list names the "
    weights += "checkpoint with the best evaluation"
    add("--weights", default="best", metavar="best|model|ema|ema2...", help=weights)
    add = parsers["prune"].add_argument
    add("--keep", type=int, default=2, help="newest whole ones to keep, beside best")
    add("--keep-every", type=int, help="keep multiples of this step too")
    add("--broken", action="store_true", help="delete broken ones too")
    add("--dry-run", action="store_true", help="print what would be deleted")
    return parser


main = CommandLine(create_parser, logs=True)

if __name__ == "__main__":
    sys.exit(main())
