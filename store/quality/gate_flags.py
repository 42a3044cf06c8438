"""Flags of programs that use gates; a module of its own so that --help loads nothing else."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_gate_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of gates."""
    add = parser.add_argument
    add(
        "--gate",
        action="append",
        metavar="TEXT",
        help="metric[@aggregate]:max_pct:max_abs:severity[?], once or more",
    )
    add("--gates", type=Path, metavar="FILE", help="YAML with a list `gates`")
    add(
        "--direction",
        action="append",
        metavar="METRIC=higher|lower",
        help="which way is better, where the catalogue does not say",
    )
    add("--undecided", choices=("fail", "pass"), help="instead of exit code 3")
