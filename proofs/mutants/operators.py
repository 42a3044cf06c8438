"""Small faults that can be planted in a source: what a tired person would write by mistake.

None is planted where it can change nothing, or only words for people: docstrings, texts with a
blank in them, f-strings, log calls, what is raised, assertions, `del`, annotations, `__all__`,
`if TYPE_CHECKING`, `@dataclass(...)`; `encoding=`, `strict=`, `stacklevel=`; the order of what
`min` or `torch.equal` take. Nor is the first value of a name deleted: a `NameError` says nothing
of the tests.
"""

from __future__ import annotations

import ast
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

KINDS = (
    "operator",
    "comparison",
    "constant",
    "deleted line",
    "swapped argument",
    "negated condition",
    "dropped keyword",
)
_SIGNS = {
    "operator": {
        "+": "-",
        "-": "+",
        "*": "/",
        "/": "*",
        "//": "*",
        "%": "*",
        "**": "*",
        "&": "|",
        "|": "&",
        "<<": ">>",
        ">>": "<<",
        "^": "&",
        "and": "or",
        "or": "and",
    },
    "comparison": {
        "<": "<=",
        "<=": "<",
        ">": ">=",
        ">=": ">",
        "==": "!=",
        "!=": "==",
        "is": "is not",
        "is not": "is",
        "in": "not in",
        "not in": "in",
    },
}
_NOTED, _WARNED = {"debug", "info"}, {"warning", "error", "exception", "warn"}
_SYMMETRIC = {"min", "max", "minimum", "maximum", "equal", "allclose", "array_equal"}
_HARMLESS = {"encoding", "strict", "stacklevel"}
_EQUALITIES = {ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn}
_SIGN = re.compile(r"([\s)]*)(<<|>>|\*\*|//|[<>=!]=|[-+*/%&|^<>]|(?:is not|not in|is|in|and|or)\b)")
_Fault = tuple[str, int, int, str]


@dataclass(frozen=True)
class Mutant:
    """One fault: bytes `start` to `end` of a file become `after`.

    Args:
      line: where it is, from 1.
      lines: first and last line of its statement, of the function for its defaults; None if it
        runs when the file is imported.
      name: the same for the same fault whatever else changes in the file.
    """

    file: str
    kind: str
    line: int
    start: int
    end: int
    before: str
    after: str
    lines: tuple[int, int] | None
    name: str = ""

    def apply(self, source: str) -> str:
        """Return the source with the fault in it."""
        data = source.encode()
        return (data[: self.start] + self.after.encode() + data[self.end :]).decode()


def list_mutants(source: str, file: str) -> list[Mutant]:
    """List all faults of a file, in its order."""
    planter = _Planter(source.encode(), file)
    mutants = sorted(
        planter.walk(ast.parse(source)), key=lambda mutant: (mutant.start, mutant.kind, mutant.end)
    )
    texts, counts = source.splitlines(), Counter()
    for index, mutant in enumerate(mutants):
        name = "|".join(
            (file, texts[mutant.line - 1].strip(), mutant.kind, mutant.before, mutant.after)
        )
        counts[name] += 1
        mutants[index] = replace(mutant, name=f"{name}|{counts[name]}")
    return mutants


class _Planter:
    """Walks a file's tree; a fault is a stretch of bytes and what stands there instead."""

    def __init__(self, data: bytes, file: str) -> None:
        self.data, self.file = data, file
        self.offsets = [0, *accumulate(len(line) for line in data.splitlines(keepends=True))]

    def walk(
        self, node: ast.AST, lines: tuple[int, int] | None = None, names: _Names | None = None
    ) -> Iterator[Mutant]:
        """Yield all faults of a node and of what is in it; `names` of the function around it."""
        if _is_skipped(node):
            return
        if isinstance(node, ast.FunctionDef):  # a default matters where the function runs
            lines = (node.body[0].lineno, node.end_lineno or node.lineno)
        elif isinstance(node, ast.stmt) and names is not None:
            inner = [n.lineno for n in ast.walk(node) if isinstance(n, ast.stmt) and n is not node]
            last = min(inner, default=(node.end_lineno or node.lineno) + 1) - 1
            lines = (node.lineno, max(last, node.lineno))
        for kind, start, end, after in self._plant(node, names):
            line, before = bisect_right(self.offsets, start), self.data[start:end].decode()
            yield Mutant(self.file, kind, line, start, end, before, after, lines)
        if isinstance(node, ast.Raise | ast.JoinedStr) or _calls(node, _WARNED):
            return
        for field, value in ast.iter_fields(node):
            own = _Names(node) if isinstance(node, ast.FunctionDef) and field == "body" else names
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and field not in ("annotation", "returns"):
                    yield from self.walk(child, lines, own)

    def _plant(self, node: ast.AST, names: _Names | None) -> Iterator[_Fault]:
        """Yield the faults of one node: kind, start, end and new text."""
        if names is not None and isinstance(node, ast.stmt) and names.may_delete(node):
            yield ("deleted line", *self._at(node), "pass")
        start, end = self._at(node) if hasattr(node, "lineno") else (0, 0)
        match node:
            case ast.BinOp(left=first, right=second) | ast.AugAssign(target=first, value=second):
                yield from self._swap_sign("operator", first, second)
            case ast.BoolOp(values=values):
                for first, second in pairwise(values):
                    yield from self._swap_sign("operator", first, second)
            case ast.Compare(left=left, comparators=others):
                for first, second in pairwise([left, *others]):
                    yield from self._swap_sign("comparison", first, second)
            case ast.UnaryOp(op=ast.USub(), operand=value) if not isinstance(value, ast.Constant):
                yield "operator", start, start + 1, ""
            case ast.UnaryOp(op=ast.Not()):
                yield "negated condition", start, start + 3, ""
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                yield from self._negate(test)
            case ast.comprehension(ifs=tests):
                yield from (fault for test in tests for fault in self._negate(test))
            case ast.Constant(value=bool(value)):
                yield "constant", start, end, repr(not value)
            case ast.Constant(value=int(value) | float(value)):
                yield "constant", start, end, repr(value + 1)
            case ast.Constant(value=str(value)) if " " not in value:
                yield "constant", start, end, repr(value + "_")
            case ast.Call():
                yield from self._change_call(node)

    def _change_call(self, node: ast.Call) -> Iterator[_Fault]:
        """Neighbouring arguments exchanged, keyword arguments left out."""
        for first, second in pairwise(node.args):
            (start, middle), (other, end) = self._at(first), self._at(second)
            left, gap, right = (
                self.data[start:middle],
                self.data[middle:other],
                self.data[other:end],
            )
            is_starred = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
            if left != right and not is_starred and not _calls(node, _SYMMETRIC):
                yield "swapped argument", start, end, (right + gap + left).decode()
        for keyword in node.keywords:
            if keyword.arg is not None and keyword.arg not in _HARMLESS:
                start, end = self._at(keyword)
                comma = re.match(rb"\s*,", self.data[end:])
                yield "dropped keyword", start, end + (comma.end() if comma else 0), ""

    def _swap_sign(self, kind: str, first: ast.AST, second: ast.AST) -> Iterator[_Fault]:
        start = self._at(first)[1]
        match = _SIGN.match(self.data[start : self._at(second)[0]].decode())
        if match and match[2] in _SIGNS[kind]:
            start += match.start(2)
            yield kind, start, start + len(match[2]), _SIGNS[kind][match[2]]

    def _negate(self, test: ast.expr) -> Iterator[_Fault]:
        """Yield the opposite of a condition, unless another kind of fault gives the same."""
        is_not = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        if not is_not and not (isinstance(test, ast.Compare) and type(test.ops[0]) in _EQUALITIES):
            start, end = self._at(test)
            yield "negated condition", start, end, f"not ({self.data[start:end].decode()})"

    def _at(self, node: Any) -> tuple[int, int]:
        start = self.offsets[node.lineno - 1] + node.col_offset
        return start, self.offsets[node.end_lineno - 1] + node.end_col_offset


class _Names:
    """Where the names of a function get their first value, and which statements are its own."""

    def __init__(self, function: ast.FunctionDef) -> None:
        self.own = {id(statement) for statement in function.body}
        self.first = {
            argument.arg: 0 for argument in ast.walk(function.args) if isinstance(argument, ast.arg)
        }
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.first[node.id] = min(node.lineno, self.first.get(node.id, node.lineno))

    def may_delete(self, node: ast.stmt) -> bool:
        """Return whether the rest could still run: no first value, no last result."""
        if isinstance(node, ast.Assign | ast.AnnAssign):
            names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
            stored = [self.first[n.id] for n in names if isinstance(n.ctx, ast.Store)]
            return node.value is not None and max(stored, default=0) < node.lineno
        if isinstance(node, ast.Return):
            return id(node) not in self.own
        return isinstance(node, ast.Expr | ast.AugAssign | ast.Raise | ast.Continue | ast.Break)


def _calls(node: ast.AST, names: set[str]) -> bool:
    """Return whether a node calls a function or method of one of these names."""
    called = node.func if isinstance(node, ast.Call) else None
    return getattr(called, "attr", getattr(called, "id", None)) in names


def _is_skipped(node: ast.AST) -> bool:
    """Return whether a change here could change nothing, or only words."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or _calls(node.value, _NOTED)
    if isinstance(node, ast.If | ast.Assign):
        first = node.test if isinstance(node, ast.If) else node.targets[0]
        return ast.unparse(first) in ("TYPE_CHECKING", "__all__")
    is_harmless = getattr(node, "arg", None) in _HARMLESS or _calls(node, {"dataclass"})
    return is_harmless or isinstance(node, ast.Assert | ast.Delete)
