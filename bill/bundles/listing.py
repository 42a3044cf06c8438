"""A listing of VLIW bundles as libtpu writes it, one operation of a program a file.

A bundle is what a TPU core issues in one cycle. Of its instructions the scalar ones are kept as
they stand, because they decide what is issued next; of the others only their kinds.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

_NAME = re.compile(r"^\d+-(.+)-\d+-packed-bundles-post-ra\.txt$")
# The compiler's top-level program is a listing of calls, not an operation.
_TOP = "TLP"
# Number of a bundle, a loop's mark such as LB, `>` for each loop around it, its instructions.
_LINE = re.compile(r"^\s*(?:0x)?([0-9a-f]+)\s+(?:[A-Z]{2}\s*)?:[ >]*\{(.*)$")
_NAMED = re.compile(r"/\*(\w+)=\*/")
# What is loaded of a core's own number; all is counted for the first core.
_IDENTITY = re.compile(r"/\* (?:core|logical chip) id \*/")
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
# tpu7x numbers the buffer of a product's results: `vmatmul.mubr.bf16.gmra.mrb[0].mxu0`.
_WORDS = re.compile(r"(?:%(\w+) = )?([a-z_][\w.]*(?:(?<=\.mrb)\[\d+\][\w.]*)?)\s*(.*)$", re.DOTALL)
# Predicate without which a step does nothing, and what its result is then.
_GUARD = re.compile(r"^\((!?%\w+)(?:,\s*([^()]*))?\),?\s*(.*)$", re.DOTALL)
# A load's guard stands behind its address.
_LOAD_GUARD = re.compile(r"\]\s*\((!?%\w+)\)")
_MARKS = re.compile(r"\[resolvable:\$\w+\]|\[thread:\$?\d+\]")
_PLACE = re.compile(r"bundleno = (\d+)")
_SCALAR = re.compile(
    r"^(s(?:mov|add|sub|mul|and|or|xor|shll|shrl|shra|min|max|neg|not|cmp|ld|st|br|phi|divrem|pop)"
    r"|p(?:or|and|nor|nand|neg|xor|mov|phi)|scalar_lea|scalar_select|int_to_ptr"
    r"|inlined_call_operand|dma)$"
)


@dataclass(frozen=True)
class ScalarStep:
    """One scalar instruction."""

    result: str  # register that it writes; may be empty
    opcode: str  # such as `scmp.lt.s32.totalorder`; `root` is what stands before the first dot
    guard: str  # predicate without which it does nothing; may be empty
    kept: str  # the result if the guard is false; empty: the old value
    operands: tuple[str, ...]
    named: dict[str, str]  # operands that carry a name, such as `size_in_granules`
    target: int = -1  # bundle that a branch goes to

    @cached_property
    def root(self) -> str:
        """The instruction without its variants."""
        return self.opcode.partition(".")[0]


@dataclass
class Bundle:
    """What is issued in one cycle: scalar steps, all instructions by kind, none in an empty one."""

    steps: tuple[ScalarStep, ...] = ()
    kinds: Counter[str] = field(default_factory=Counter)


def list_listings(folder: Path) -> dict[str, Path]:
    """List the listings of a folder by the operation's name; the last one of a name counts."""
    listings = {}
    for path in sorted(folder.iterdir()):
        name = _NAME.match(path.name)
        if name and name[1] != _TOP:
            listings[name[1]] = path
    return listings


def read_listing(text: str) -> list[Bundle]:
    """Read the bundles of a listing, by their numbers."""
    # Names of operands stand in comments, and comments quote such operands.
    plain = _COMMENT.sub("", _NAMED.sub(r"\1=", _IDENTITY.sub(", identity=0", text)))
    bundles: list[Bundle] = []
    for line in plain.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        # Numbers may leave gaps: empty bundles, which are issued all the same.
        place = int(match[1], 16)
        while len(bundles) <= place:
            bundles.append(Bundle())
        bundles[place] = _read_bundle(match[2])
    return bundles


def _read_bundle(text: str) -> Bundle:
    steps: list[ScalarStep] = []
    kinds = Counter[str]()
    for part in text.rstrip().removesuffix("}").split(";;"):
        match = _WORDS.match(part.strip())
        if match is None or match[2].startswith("compiler"):
            continue
        kinds[match[2]] += 1
        if _SCALAR.match(match[2].partition(".")[0]):
            steps.append(_read_step(match[1] or "", match[2], match[3]))
    return Bundle(tuple(steps), kinds)


def _read_step(result: str, opcode: str, rest: str) -> ScalarStep:
    rest = _MARKS.sub("", rest).strip()
    guard = _GUARD.match(rest)
    condition, kept, rest = (guard[1], guard[2] or "", guard[3]) if guard else ("", "", rest)
    behind = _LOAD_GUARD.search(rest) if opcode == "sld" else None
    if behind:
        condition, rest = behind[1], rest[: behind.start() + 1] + rest[behind.end() :]
    target = _PLACE.search(rest)
    plain: list[str] = []
    named: dict[str, str] = {}
    for operand in _split(rest):
        name, mark, value = operand.partition("=")
        if mark and name.isidentifier():
            named[name] = value.strip()
        else:
            plain.append(operand)
    place = int(target[1]) if target else -1
    return ScalarStep(result, opcode, condition, kept, tuple(plain), named, place)


def _split(text: str) -> list[str]:
    """Split at commas outside brackets."""
    parts: list[str] = []
    depth, current = 0, ""
    for letter in text:
        depth += {"[": 1, "(": 1, "]": -1, ")": -1}.get(letter, 0)
        if letter == "," and not depth:
            parts.append(current.strip())
            current = ""
        else:
            current += letter
    return [*parts, current.strip()] if current.strip() else parts
