"""Lists the programs of this folder, a line each, and the old names of programs.

python -m tools
python -m tools.NAME --help
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

from utils.programs import CommandLine, create_program_parser

FOLDER = Path(__file__).resolve().parent
# Old command -> the command that it runs.
OLD_NAMES = {
    "python -m tools.benchmark": "python -m proofs.benchmark",
    "python -m tools.benchmark_input": "python -m proofs.benchmark_input",
    "python -m tools.cache_teacher": "python -m tools.cache write",
    "python -m tools.compile_for_tpu": "python -m bill.compile_for_tpu",
    "python -m tools.host_feed": "python -m proofs.host_feed",
    "python -m tools.lab.NAME": "python -m lab.NAME",
    "python -m tools.parity": "python -m proofs.parity",
    "python -m tools.proofs.NAME": "python -m proofs.NAME",
    "python -m tools.shape_advisor": "python -m bill.shape_advisor",
    "python -m tools.test_tfds_loader_multihost": "python -m proofs.multihost_loader",
    "python delta_attention_comparison/benchmark_script.py": "python -m lab.delta",
    "bash scripts/launch_tpu.sh": "bash train/sky/launch_tpu.sh",
    "bash scripts/sync_code.sh": "bash train/sky/sync_code.sh",
}


def create_parser() -> argparse.ArgumentParser:
    """Create the parser, which has no flags."""
    return create_program_parser(__doc__, prog="python -m tools")


def show(_: argparse.Namespace) -> None:
    """Print the programs."""
    programs = list_programs()
    width = max(map(len, programs))
    print("python -m tools.NAME --help says more.")
    for name, line in programs.items():
        print(f"  {name:<{width}}  {line}")
    print("Old names:")
    for old, new in OLD_NAMES.items():
        print(f"  {old}: {new}")


def list_programs() -> dict[str, str]:
    """Return the first line of each program's docstring by name, without those of `OLD_NAMES`."""
    files = {path.parent.name: path for path in FOLDER.glob("*/__main__.py")}
    files |= {path.stem: path for path in FOLDER.glob("*.py") if not path.stem.startswith("_")}
    texts = {name: path.read_text(encoding="utf-8") for name, path in sorted(files.items())}
    return {
        name: (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
        for name, text in texts.items()
        if "\nif __name__ ==" in text and f"python -m tools.{name}" not in OLD_NAMES
    }


main = CommandLine(create_parser, show)

if __name__ == "__main__":
    sys.exit(main())
