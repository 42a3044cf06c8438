"""Trains the rows of a study over several seeds and writes its table into a document.

    python -m proofs.study proofs/studies/delta_recall.yaml --seeds 0 1

The YAML names a program of `proofs.tables` (`table`), its flags and keys of every run (`keys`);
flags and keys of the command line replace them. Finished runs are kept as long as their
configuration is the same, so that the program can be stopped and started again. All runs go one
after the other in this process.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import yaml

from proofs.study.frame import EPILOG
from utils.errors import UserError
from utils.json_types import JsonValue
from utils.programs import CommandLine, create_program_parser
from utils.registry import load_object

_NOT_A_STUDY = (OSError, ValueError, yaml.YAMLError, ImportError)


def create_parser() -> argparse.ArgumentParser:
    """Create the command line."""
    parser = create_program_parser(__doc__, prog="python -m proofs.study", epilog=EPILOG)
    parser.add_argument("study", type=Path, metavar="FILE", help="YAML of proofs/studies")
    return parser


def run(options: argparse.Namespace) -> int:
    """Run the study's program with the YAML's flags before those of the command line."""
    program, flags = read_study(options.study)
    return program([*flags, *options.rest])


def read_study(path: Path) -> tuple[CommandLine, list[str]]:
    """Read a study: the program of its table, and its flags; a UserError if it is not one."""
    try:
        study = yaml.safe_load(path.read_text(encoding="utf-8"))
        program = load_object(study.pop("table") + ":main")
        keys = [f"--{key}={_spell(value)}" for key, value in study.pop("keys", {}).items()]
    except (*_NOT_A_STUDY, AttributeError, LookupError, TypeError) as error:
        raise UserError(
            f"FILE ({str(path)!r}) is not a study: {error}; use one of proofs/studies"
        ) from error
    flags: list[str] = []
    for name, value in study.items():
        flags += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return program, [*flags, *keys]


def _spell(value: JsonValue) -> str:
    return value if isinstance(value, str) else json.dumps(value)


main = CommandLine(create_parser, run, takes_keys=True)

if __name__ == "__main__":
    sys.exit(main())
