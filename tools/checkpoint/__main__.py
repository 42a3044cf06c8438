"""What a run has saved: `python -m tools.checkpoint {list,verify,diff,export,prune} PLACE ...`.

PLACE is a run, its `checkpoints/` or a `step_...` directory, on a disk or behind a URL such as
gs://bucket/runs/digits/first. `list` and `diff` show, `verify` reads every tensor, `export` writes
weights for timm, `prune` deletes old checkpoints and never the last whole one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from utils.programs import CommandLine, create_program_parser

_COMMANDS = "tools.checkpoint.checkpoint_commands"


def create_parser() -> argparse.ArgumentParser:
    """One parser for each command."""
    parser = create_program_parser(__doc__, prog="python -m tools.checkpoint")
    commands = parser.add_subparsers(required=True, metavar="{list,verify,diff,export,prune}")
    shown = commands.add_parser("list", help="steps, sizes, which is best, which are broken")
    shown.set_defaults(run=f"{_COMMANDS}:list_checkpoints")
    shown.add_argument("place", metavar="PLACE")
    verify = commands.add_parser("verify", help="read every tensor of every checkpoint")
    verify.set_defaults(run=f"{_COMMANDS}:verify_checkpoints")
    verify.add_argument("place", metavar="PLACE", nargs="+")
    diff = commands.add_parser("diff", help="tensors that differ, and by how much")
    diff.set_defaults(run=f"{_COMMANDS}:diff_checkpoints")
    diff.add_argument("first", metavar="A")
    diff.add_argument("second", metavar="B")
    diff.add_argument("--parts", default="", help="only these, such as model,ema (default: all)")
    diff.add_argument("--limit", type=int, default=40, help="tensors to name")
    export = commands.add_parser("export", help="weights as timm safetensors or as one .pth")
    export.set_defaults(run=f"{_COMMANDS}:export_weights")
    export.add_argument("place", metavar="PLACE")
    export.add_argument(
        "--out",
        type=Path,
        required=True,
        help="FILE.safetensors, or FILE.pth: a dictionary with state_dict, arch and step; "
        "FILE.json beside it tells the model and its run",
    )
    export.add_argument(
        "--weights", default="best", metavar="best|model|ema|ema2...",
        help="of that checkpoint: best is the first average of the weights where there is one, "
        "else the model (default best); ema2 is the first of train.ema_more; the checkpoint with "
        "the best evaluation is named by list",
    )  # fmt: skip
    prune = commands.add_parser("prune", help="delete old checkpoints")
    prune.set_defaults(run=f"{_COMMANDS}:prune_checkpoints")
    prune.add_argument("place", metavar="PLACE")
    prune.add_argument("--keep", type=int, default=2, help="newest whole ones to keep, beside best")
    prune.add_argument("--keep-every", type=int, help="keep multiples of this step too")
    prune.add_argument("--broken", action="store_true", help="delete broken ones too")
    prune.add_argument("--dry-run", action="store_true", help="say what would be deleted")
    return parser


main = CommandLine(create_parser, logs=True)

if __name__ == "__main__":
    sys.exit(main())
