"""The language that chooses runs: `data.name=imagenet2012 and eval.top1>70`.

    filter     = alternative {"or" alternative}
    alternative = term {"and" term}
    term       = "not" term | "(" filter ")" | KEY [OPERATOR VALUE]
    OPERATOR   = "=" | "!=" | "<" | "<=" | ">" | ">=" | "~"

A key is a fact of the run (`status`, `experiment`, `tag`, ...), a key of its configuration
(`optim.lr`, `model.args.depth`) or a number (`eval.top1`, `train.loss/total`); `teacher` is any
name of a run that it has learnt from, in any generation, `teacher.tag` a tag of one. Alone a key
says that the run has it. A value is a word, or a text in quotes. Numbers are compared as numbers,
other values as text; `~` asks whether the text contains another, or fits a pattern with `*` and
`?`. A run that lacks the key fits no comparison, not even `!=`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol

from utils.errors import UserError, get_near_names
from utils.json_types import JsonValue

_TOKENS = re.compile(
    r"""\s*(?:(?P<operator>!=|<=|>=|==|=|<|>|~)|(?P<bracket>[()])"""
    r"""|"(?P<double>(?:[^"\\]|\\.)*)"|'(?P<single>(?:[^'\\]|\\.)*)'|(?P<word>[^\s()=<>!~"']+))"""
)
_WORDS = ("and", "or", "not")
# Keys with several values at once: one of them must fit, and none for `!=`.
_MANY = ("tag", "teacher", "teacher.tag")
_ORDER: dict[str, Callable[[float, float], bool]] = {
    "<": lambda a, b: a < b, "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b, ">=": lambda a, b: a >= b,
}  # fmt: skip

# A run's value of a key; none: it lacks the key.
Lookup = Callable[[str], JsonValue]


class Filter(Protocol):
    """A condition on runs."""

    def fits(self, lookup: Lookup) -> bool:
        """Whether a run fits."""

    def get_keys(self) -> set[str]:
        """The keys that it asks for."""


@dataclass(frozen=True)
class _Has:
    key: str

    def fits(self, lookup: Lookup) -> bool:
        return lookup(self.key) not in (None, [])

    def get_keys(self) -> set[str]:
        return {self.key}


@dataclass(frozen=True)
class _Compares:
    key: str
    operator: str
    value: str
    is_quoted: bool

    def fits(self, lookup: Lookup) -> bool:
        found = lookup(self.key)
        if found is None:
            return self.operator == "=" and self.value in ("none", "null") and not self.is_quoted
        if self.key in _MANY and isinstance(found, list):
            if self.operator == "!=":
                return all(self._compare(tag) for tag in found)
            return any(self._compare(tag) for tag in found)
        return self._compare(found)

    def get_keys(self) -> set[str]:
        return {self.key}

    def _compare(self, found: JsonValue) -> bool:
        if self.operator in _ORDER:
            number, limit = _to_number(found), float(self.value)
            return number is not None and _ORDER[self.operator](number, limit)
        if self.operator == "~":
            return _contains(_to_text(found), self.value)
        return self._equals(found) == (self.operator == "=")

    def _equals(self, found: JsonValue) -> bool:
        number = None if self.is_quoted else _to_number(self.value)
        mine = _to_number(found)
        if number is not None and mine is not None:
            return number == mine or (math.isnan(number) and math.isnan(mine))
        text = _to_text(found)
        return text == (self.value.lower() if isinstance(found, bool) else self.value)


@dataclass(frozen=True)
class _Not:
    inner: Filter

    def fits(self, lookup: Lookup) -> bool:
        return not self.inner.fits(lookup)

    def get_keys(self) -> set[str]:
        return self.inner.get_keys()


@dataclass(frozen=True)
class _Joined:
    parts: tuple[Filter, ...]
    join: Callable[[Iterable[bool]], bool]

    def fits(self, lookup: Lookup) -> bool:
        return self.join(part.fits(lookup) for part in self.parts)

    def get_keys(self) -> set[str]:
        return set().union(*(part.get_keys() for part in self.parts))


def parse_filter(text: str) -> Filter:
    """The condition that a text says; an empty one is fit by every run.

    Raises:
      UserError: it breaks the rules; says where.
    """
    return _Parser(text).parse()


def check_keys(keys: Iterable[str], known: Iterable[str], flag: str = "--filter") -> None:
    """Refuse keys that no run has.

    Raises:
      UserError: names the nearest keys.
    """
    known = set(known)
    for key in sorted(set(keys) - known):
        last = [one for one in known if one.rpartition(".")[2] == key.rpartition(".")[2]]
        near = sorted(last)[:3] or get_near_names(key, known)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "no key is near it;"
        raise UserError(
            f"{flag}: no run has a key {key!r}; {hint} `python -m tools.runs list --keys` shows "
            "what there is"
        )


def choose(
    wanted: Filter, runs: Iterable[int], columns: Mapping[str, Mapping[int, JsonValue]]
) -> Iterator[int]:
    """Those of some runs that fit, in their order.

    Args:
      columns: key -> run -> value, for all keys of the filter.
    """
    for run in runs:
        if wanted.fits(lambda key, run=run: columns[key].get(run)):
            yield run


class _Parser:
    """One pass over a text's tokens, by recursive descent."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(_split(text))
        self._place = 0

    def parse(self) -> Filter:
        if not self._tokens:
            return _Joined((), all)
        found = self._read_joined("or", any)
        if self._place < len(self._tokens):
            raise self._explain("'and' or 'or' is missing before")
        return found

    def _read_joined(self, word: str, join: Callable[[Iterable[bool]], bool]) -> Filter:
        read = self._read_term if word == "and" else lambda: self._read_joined("and", all)
        parts = [read()]
        while self._take(word):
            parts.append(read())
        return parts[0] if len(parts) == 1 else _Joined(tuple(parts), join)

    def _read_term(self) -> Filter:
        if self._take("not"):
            return _Not(self._read_term())
        if self._take("("):
            found = self._read_joined("or", any)
            if not self._take(")"):
                if self._place == len(self._tokens):
                    raise UserError(f"--filter {self._text!r}: a bracket is not closed; add ')'")
                raise self._explain("')' is missing before")
            return found
        kind, key = self._next("a key")
        if kind not in ("word", "quoted") or (kind == "word" and key in _WORDS):
            self._place -= 1
            raise self._explain("a key is missing before")
        if self._place == len(self._tokens) or self._tokens[self._place][0] != "operator":
            return _Has(key)
        operator = self._next("an operator")[1].replace("==", "=")
        kind, value = self._next("a value")
        if kind not in ("word", "quoted"):
            self._place -= 1
            raise self._explain("a value is missing before")
        if operator in _ORDER and _to_number(value) is None:
            raise UserError(
                f"--filter: {key}{operator}{value}: {value!r} is no number; {operator} compares "
                "numbers, = and ~ text"
            )
        return _Compares(key, operator, value, kind == "quoted")

    def _take(self, text: str) -> bool:
        is_there = self._place < len(self._tokens) and self._tokens[self._place] in (
            ("word", text), ("bracket", text),
        )  # fmt: skip
        self._place += is_there
        return is_there

    def _next(self, what: str) -> tuple[str, str]:
        if self._place == len(self._tokens):
            raise UserError(f"--filter {self._text!r} ends where {what} should stand; complete it")
        self._place += 1
        return self._tokens[self._place - 1]

    def _explain(self, words: str) -> UserError:
        rest = " ".join(text for _, text in self._tokens[self._place :]) or "the end"
        return UserError(
            f"--filter {self._text!r}: {words} {rest!r}; write KEY=VALUE, joined by and, or, not "
            "and brackets, with quotes around values that have blanks"
        )


def _split(text: str) -> Iterable[tuple[str, str]]:
    place, end = 0, len(text.rstrip())
    while place < end:
        match = _TOKENS.match(text, place)
        if match is None:
            raise UserError(
                f"--filter {text!r}: {text[place:].strip()!r} cannot be read; a quote is not "
                "closed, or a sign stands alone"
            )
        place = match.end()
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


def _to_text(value: JsonValue) -> str:
    """As a person writes it: true, a number, a list in JSON."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _contains(text: str, part: str) -> bool:
    return fnmatchcase(text, part) if set(part) & set("*?") else part in text
