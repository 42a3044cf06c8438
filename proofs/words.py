"""Finds wording that costs a second reading.

`python -m proofs.words [ROOT] [--room PATH ...]` prints file, line and excerpt of each idiom in
docstrings, messages and documents, of each assignment to a variable without a telling name, and of
each function docstring that does not begin with a verb; then the counts with their bounds. Exit
code 1: a bound is exceeded.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from utils.errors import EXIT_FAILED
from utils.programs import create_program_parser, run_program

ROOT = Path(__file__).resolve().parents[1]

# Case matters: `None` is a value, `none` an idiom.
IDIOMS = (
    r"\bnone: ",
    r"\bempty: there ",
    r"\b[Nn]obody\b",
    r"\b[Ww]ho(so)?ever\b",
    r"\b(is|are|was|were) none\b",
    r"[;,] none (if|where|is|are|of)\b",
    r"\bworks? not\b",
    r"\bis let be\b|\bare let be\b|\blets? (it|them) be\b",
    r"\b[Tt](old|ells?) of\b",
    r"\b(is|are|was) told\b",
    r"\basks? for it\b",
    r"\bmeans? nothing\b",
    r"\bknows? nothing\b",
    r"\bnothing (is|was) (told|known)\b",
    r"\bhas nothing to say\b",
    r"\bin vain\b",
    r"\b(out of|from) nothing\b",
    r"\bmade[- ]up\b",
    r"\bby whose\b",
    r"\bwould judge\b",
    r"\bsomebody\b|\banybody\b",
    r"\bby and by\b",
    r"\bso to say\b",
)
VAGUE_NAMES = ("one", "found", "told")
# Words that no sentence about an action begins with.
_NOT_VERBS = {
    *("A", "An", "The", "What", "Whether", "How", "Where", "Which", "Who", "Whoever", "That"),
    *("All", "Each", "Every", "One", "It", "Its", "These", "This", "Those", "Names", "None"),
}
# What is left in rooms that have not been reworded; lowered with each of them.
BOUNDS = {"idioms": 14, "vague names": 11, "docstrings without a verb": 10}
_IDIOM = re.compile("|".join(IDIOMS))
_DECORATED_NOUNS = ("property", "cached_property", "computed_field", "overload", "fixture")


@dataclass(frozen=True)
class Wording:
    """One place that should be reworded."""

    kind: str  # a key of `BOUNDS`
    path: str  # relative to the checkout
    line: int  # counted from 1
    excerpt: str  # the words around it


def find_in_text(text: str, path: str, first_line: int = 1) -> Iterator[Wording]:
    """Find the idioms of a text whose first line has the given number."""
    for match in _IDIOM.finditer(text):
        line = first_line + text.count("\n", 0, match.start())
        excerpt = " ".join(text[max(0, match.start() - 45) : match.end() + 35].split())
        yield Wording("idioms", path, line, excerpt)


def find_in_source(source: str, path: str) -> Iterator[Wording]:
    """Find the idioms, vague names and noun-like function docstrings of a Python file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if " " in node.value:
                yield from find_in_text(node.value, path, node.lineno)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            if node.id in VAGUE_NAMES:
                yield Wording("vague names", path, node.lineno, node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = (ast.get_docstring(node) or "").partition("\n")[0]
            if first.split(" ")[0] in _NOT_VERBS and not _is_noun(node):
                yield Wording("docstrings without a verb", path, node.lineno, first)


def find_in_checkout(root: Path) -> list[Wording]:
    """Find the wordings of a checkout's sources (tests left out) and documents."""
    patterns = ("*.py", "*.md", "*.yaml", "*.html", "*.sh")
    listed = subprocess.check_output(["git", "ls-files", *patterns], cwd=root, text=True)
    findings: list[Wording] = []
    for path in listed.split():
        if path.startswith("tests/") or path == "proofs/words.py":
            continue
        text = (root / path).read_text(encoding="utf-8")
        findings += (find_in_source if path.endswith(".py") else find_in_text)(text, path)
    return findings


def main(argv: list[str] | None = None) -> int:
    """Print the findings and the counts; 1 if a bound is exceeded."""
    options = _create_parser().parse_args(argv)
    findings = find_in_checkout(Path(options.checkout))
    for finding in findings:
        if any(finding.path.startswith(room) for room in options.room):
            print(f"{finding.path}:{finding.line}: {finding.kind}: {finding.excerpt}")
    counts = Counter(finding.kind for finding in findings)
    for kind, bound in BOUNDS.items():
        print(f"{kind:<30}{counts[kind]:>8,}  <= {bound:,}")
    return EXIT_FAILED if any(counts[kind] > bound for kind, bound in BOUNDS.items()) else 0


def _is_noun(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function is read as an attribute."""
    names = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
    return bool(names.intersection(_DECORATED_NOUNS))


def _create_parser() -> argparse.ArgumentParser:
    parser = create_program_parser(__doc__)
    parser.add_argument(
        "checkout", nargs="?", default=str(ROOT), help="the checkout (default: this)"
    )
    parser.add_argument(
        "--room", nargs="*", default=[], metavar="PATH", help="print findings below these paths"
    )
    return parser


if __name__ == "__main__":
    sys.exit(run_program(main))
