"""Prints the script that completes verbs and flags of `tpudistil` in a shell.

eval "$(tpudistil completion bash)"
eval "$(tpudistil completion zsh)"
tpudistil completion fish | source
"""

from __future__ import annotations

import argparse
import sys

from utils.programs import CommandLine, create_program_parser
from utils.storage.installation import PRODUCT


def create_parser() -> argparse.ArgumentParser:
    """Create the parser of the flags."""
    parser = create_program_parser(__doc__, prog="python -m tools.completion")
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="whose language to write")
    return parser


def show(options: argparse.Namespace) -> None:
    """Print the script."""
    import argcomplete

    print(argcomplete.shellcode([PRODUCT], shell=options.shell))


main = CommandLine(create_parser, show)

if __name__ == "__main__":
    sys.exit(main())
