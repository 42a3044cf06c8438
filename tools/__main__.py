"""Lists the programs of this folder, a line each, and the old names of programs.

python -m tools
python -m tools.NAME --help

They are the verbs of the installed program `tpudistil`, beside those of `VERBS`.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from utils.errors import get_hint
from utils.programs import CommandLine, choose_error_form, create_program_parser
from utils.registry import load_object
from utils.storage.installation import PRODUCT, ROOT

FOLDER = Path(__file__).resolve().parent
# Verbs of the installed program that are not of this folder -> module.
VERBS = {"compile": "bill.compile_for_tpu", "train": "main"}
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
        name: _read_first_line(text)
        for name, text in texts.items()
        if "\nif __name__ ==" in text and f"python -m tools.{name}" not in OLD_NAMES
    }


def _read_first_line(text: str) -> str:
    """Return the first line of a file's docstring."""
    return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]


def run_verb(words: Sequence[str]) -> int:
    """Run `tpudistil VERB ...`, or complete it for a shell; return the exit code."""
    verbs = list_verbs()
    verb = words[0].replace("-", "_") if words else ""
    if "_ARGCOMPLETE" in os.environ:  # the words are in the environment
        _complete(verbs)
    if verb not in verbs:
        with choose_error_form(words) as rest:
            parser = _create_verb_parser(verbs)
            name = parser.parse_args(rest or ["--help"]).verb
            parser.error(f"unknown verb {name!r}; {get_hint(name, list(verbs))}")
    return load_object(f"{verbs[verb]}:main")(words[1:])


def list_verbs() -> dict[str, str]:
    """Map each verb of the installed program to its module."""
    modules = {
        name: f"tools.{name}" + (".__main__" if (FOLDER / name).is_dir() else "")
        for name in list_programs()
    }
    return dict(sorted({**VERBS, **modules}.items()))


def _create_verb_parser(verbs: dict[str, str]) -> argparse.ArgumentParser:
    """Create the parser of the verb alone, whose help lists all."""
    lines = list_programs()
    for name, module in VERBS.items():
        path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
        lines[name] = _read_first_line(path.read_text(encoding="utf-8"))
    width = max(map(len, verbs))
    listed = "\n".join(f"  {name:<{width}}  {lines[name]}" for name in verbs)
    parser = create_program_parser(
        f"Train and distil vision models on Cloud TPUs, in PyTorch.\n\n{listed}",
        prog=PRODUCT,
        usage=f"{PRODUCT} VERB ..., {PRODUCT} VERB --help",
    )
    version = (ROOT / "VERSION").read_text(encoding="utf-8").strip()
    parser.add_argument("--version", action="version", version=f"{PRODUCT} {version}")
    parser.add_argument("verb", metavar="VERB", help=argparse.SUPPRESS)
    return parser


def _complete(verbs: dict[str, str]) -> None:
    """Print what the shell's last word may become, and exit."""
    import argcomplete

    line = os.environ.get("COMP_LINE", "")
    words = line.split()
    is_verb_whole = len(words) > 2 or line.endswith(" ")
    if len(words) < 2 or words[1] not in verbs or not is_verb_whole:
        parser = _create_verb_parser(verbs)
        parser._actions[-1].choices = tuple(verbs)
        argcomplete.autocomplete(parser)
    os.environ["_ARGCOMPLETE"] = "2"  # the verb is the program
    owner = "utils.config.load" if words[1] == "train" else verbs[words[1]]
    argcomplete.autocomplete(load_object(f"{owner}:create_parser")())


main = CommandLine(create_parser, show)

if __name__ == "__main__":
    sys.exit(main())
