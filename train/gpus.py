"""Runs main.py on GPUs by torchrun: one process for each, on one node or on several.

    python -m train.gpus --gpus 8 -- main.py --config C
    python -m train.gpus --gpus 8 --nodes 2 --node-rank 0 --master HOST -- main.py --config C

The second line runs on every node, with its own --node-rank.
"""

from __future__ import annotations

import argparse
import sys

from train import commands
from train.execute import Executor
from utils.errors import UserError
from utils.programs import CommandLine, create_program_parser


def create_parser() -> argparse.ArgumentParser:
    """Create the parser of the command line."""
    parser = create_program_parser(__doc__, prog="python -m train.gpus")
    add = parser.add_argument
    add("--gpus", type=int, required=True, help="GPUs of each node")
    add("--nodes", type=int, default=1, help="number of nodes (default 1)")
    add("--node-rank", type=int, default=0, help="which of them this is, from 0")
    add("--master", default="", help="name or address of node 0, for several nodes")
    add("--dry-run", action="store_true", help="print the command instead of running it")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Start torchrun on this node and return its exit code; a UserError if flags contradict."""
    words = arguments.command
    if not words:
        raise UserError("there is no program; write it after --, such as -- main.py --config C")
    if arguments.gpus < 1 or arguments.nodes < 1:
        raise UserError(
            f"--gpus ({arguments.gpus}) and --nodes ({arguments.nodes}) must be at least 1"
        )
    if not 0 <= arguments.node_rank < arguments.nodes:
        raise UserError(
            f"--node-rank ({arguments.node_rank}) is not below --nodes ({arguments.nodes}); nodes "
            "are counted from 0"
        )
    if arguments.nodes > 1 and not arguments.master:
        raise UserError("--nodes above 1 needs --master, the name or address of node 0")
    command = commands.torchrun(
        words,
        gpus=arguments.gpus,
        nodes=arguments.nodes,
        node_rank=arguments.node_rank,
        master=arguments.master,
    )
    return Executor(dry_run=arguments.dry_run).call(command)


main = CommandLine(create_parser, run, takes_command=True)

if __name__ == "__main__":
    sys.exit(main())
