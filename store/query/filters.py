"""The language that chooses runs: `data.name=imagenet2012 and eval.top1>70`.

    filter     = alternative {"or" alternative}
    alternative = term {"and" term}
    term       = "not" term | "(" filter ")" | KEY [OPERATOR VALUE]
    OPERATOR   = "=" | "!=" | "<" | "<=" | ">" | ">=" | "~"

A key is a fact of the run (`status`, `experiment`, `tag`, ...), a key of its configuration
(`optim.lr`, `model.args.depth`) or a number (`eval.top1`, `train.loss/total`); `teacher` is any
name of a run that it was distilled from, in any generation, `teacher.tag` a tag of one. A key alone
fits runs that have it. A value is a word, or a text in quotes. Numbers are compared as numbers,
other values as text; `~` fits a text that contains the value, or matches it as a pattern with `*`
and `?`. A run that lacks the key fits no comparison, not even `!=`.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from utils.errors import UserError, get_near_names
from utils.json_types import JsonValue

_TOKENS = re.compile(
    r"""\s*(?:(?P<operator>!=|<=|>=|==|=|<|>|~)|(?P<bracket>[()])"""
    r"""|"(?P<double>(?:[^"\\]|\\.)*)"|'(?P<single>(?:[^'\\]|\\.)*)'|(?P<word>[^\s()=<>!~"']+))"""
)
# Keys with several values at once: one of them must fit; for `!=` no value may be equal.
_MANY = ("tag", "teacher", "teacher.tag")
_ORDER = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}

# Returns a run's value of a key; None if it lacks the key.
Lookup = Callable[[str], JsonValue]


@dataclass(frozen=True)
class Filter:
    """A condition on runs: the keys that it reads, and whether a run's values fit."""

    keys: frozenset[str]
    fits: Callable[[Lookup], bool]


def parse_filter(text: str) -> Filter:
    """Parse a filter, which every run fits if it is empty; UserError names the fault."""
    return _Parser(text).parse()


def check_keys(keys: Iterable[str], known: Iterable[str], flag: str = "--filter") -> None:
    """Refuse keys that no run has; UserError suggests the nearest ones."""
    known = set(known)
    for key in sorted(set(keys) - known):
        last = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
        near = sorted(last)[:3] or get_near_names(key, known)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "no key is near it;"
        raise UserError(
            f"{flag}: no run has a key {key!r}; {hint} `python -m tools.runs list --keys` lists "
            "all keys"
        )


class _Parser:
    """A recursive descent over a text's tokens."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(_split(text))
        self._next_token = 0

    def parse(self) -> Filter:
        if not self._tokens:
            return Filter(frozenset(), lambda lookup: True)
        parsed = self._read_joined("or", any)
        if self._next_token < len(self._tokens):
            raise self._explain("'and' or 'or' is missing before")
        return parsed

    def _read_joined(self, word: str, join: Callable[[Iterable[bool]], bool]) -> Filter:
        read = self._read_term if word == "and" else lambda: self._read_joined("and", all)
        parts = [read()]
        while self._take(word):
            parts.append(read())
        keys = frozenset().union(*(part.keys for part in parts))
        return Filter(keys, lambda lookup: join(part.fits(lookup) for part in parts))

    def _read_term(self) -> Filter:
        if self._take("not"):
            inner = self._read_term()
            return Filter(inner.keys, lambda lookup: not inner.fits(lookup))
        if self._take("("):
            inner = self._read_joined("or", any)
            if not self._take(")"):
                if self._next_token == len(self._tokens):
                    raise UserError(f"--filter {self._text!r}: a bracket is not closed; add ')'")
                raise self._explain("')' is missing before")
            return inner
        kind, key = self._next("a key")
        if kind not in ("word", "quoted") or (kind == "word" and key in ("and", "or", "not")):
            self._next_token -= 1
            raise self._explain("a key is missing before")
        at_end = self._next_token == len(self._tokens)
        if at_end or self._tokens[self._next_token][0] != "operator":
            return Filter(frozenset({key}), lambda lookup: lookup(key) not in (None, []))
        sign = self._next("an operator")[1].replace("==", "=")
        kind, value = self._next("a value")
        if kind not in ("word", "quoted"):
            self._next_token -= 1
            raise self._explain("a value is missing before")
        if sign in _ORDER and _to_number(value) is None:
            raise UserError(
                f"--filter: {key}{sign}{value}: {value!r} is no number; {sign} compares numbers, "
                "= and ~ text"
            )
        comparison = _Comparison(key, sign, value, kind == "quoted")
        return Filter(frozenset({key}), lambda lookup: comparison.fits(lookup(key)))

    def _take(self, text: str) -> bool:
        rest = self._tokens[self._next_token : self._next_token + 1]
        is_there = rest in ([("word", text)], [("bracket", text)])
        self._next_token += is_there
        return is_there

    def _next(self, expected: str) -> tuple[str, str]:
        if self._next_token == len(self._tokens):
            raise UserError(f"--filter {self._text!r} ends where {expected} is missing; add it")
        self._next_token += 1
        return self._tokens[self._next_token - 1]

    def _explain(self, words: str) -> UserError:
        rest = " ".join(text for _, text in self._tokens[self._next_token :]) or "the end"
        return UserError(
            f"--filter {self._text!r}: {words} {rest!r}; write KEY=VALUE, joined by and, or, not "
            "and brackets, with quotes around values that contain blanks"
        )


@dataclass(frozen=True)
class _Comparison:
    key: str
    operator: str
    value: str
    is_quoted: bool

    def fits(self, actual: JsonValue) -> bool:
        if actual is None:
            return self.operator == "=" and self.value in ("none", "null") and not self.is_quoted
        if self.key in _MANY and isinstance(actual, list):
            join = all if self.operator == "!=" else any
            return join(self._fits_value(item) for item in actual)
        return self._fits_value(actual)

    def _fits_value(self, actual: JsonValue) -> bool:
        number, text = _to_number(actual), actual
        if not isinstance(text, str):  # as a person writes it: true, a number, a list in JSON
            text = json.dumps(actual, sort_keys=True)
        if self.operator in _ORDER:
            return number is not None and _ORDER[self.operator](number, float(self.value))
        if self.operator == "~":
            is_pattern = set(self.value) & set("*?")
            return fnmatchcase(text, self.value) if is_pattern else self.value in text
        wanted = None if self.is_quoted else _to_number(self.value)
        if wanted is not None and number is not None:
            is_equal = wanted == number or (math.isnan(wanted) and math.isnan(number))
        else:
            is_equal = text == (self.value.lower() if isinstance(actual, bool) else self.value)
        return is_equal == (self.operator == "=")


def _split(text: str) -> Iterable[tuple[str, str]]:
    start, end = 0, len(text.rstrip())
    while start < end:
        match = _TOKENS.match(text, start)
        if match is None:
            raise UserError(
                f"--filter {text!r}: {text[start:].strip()!r} cannot be read; close its quotes, "
                "and complete a single sign"
            )
        start = match.end()
        kind = match.lastgroup or ""
        value = match[kind]
        if kind in ("double", "single"):
            kind, value = "quoted", re.sub(r"\\(.)", r"\1", value)
        yield kind, value


def _to_number(value: JsonValue) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
