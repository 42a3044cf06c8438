"""Patterns over dotted names, such as those of a model's tensors: `*` matches any text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from utils.errors import UserError, get_near_names


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether any of the patterns matches the whole name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def get_first_match(name: str, values: Mapping[str, float], default: float) -> float:
    """Return the value of the first pattern that matches a name, or the default."""
    return next((value for old, value in values.items() if fnmatchcase(name, old)), default)


def rename(name: str, rules: Mapping[str, str]) -> str:
    """Rename by the first matching rule; each `*` of the new name takes the old one's text.

    >>> rename("encoder.layer.3.mlp", {"encoder.layer.*": "blocks.*"})
    'blocks.3.mlp'
    """
    for old, new in rules.items():
        match = re.fullmatch("(.*)".join(re.escape(part) for part in old.split("*")), name)
        if match:
            texts = [*match.groups()[: new.count("*")], ""]
            return "".join(map("".join, zip(new.split("*"), texts, strict=True)))
    return name


def check_rules(key: str, rules: Mapping[str, str], names: Iterable[str]) -> None:
    """Raise a UserError for a rule of `rename` without a match, or with more `*` on the right."""
    check_patterns(key, tuple(rules), names)
    for old, new in rules.items():
        if new.count("*") > old.count("*"):
            raise UserError(
                f"{key} ({old!r}: {new!r}) has more * on the right than texts on the left; write "
                "as many"
            )


def check_patterns(key: str, patterns: Sequence[str], names: Iterable[str]) -> None:
    """Raise a UserError for `key` with similar names if a pattern matches no name."""
    known = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            near = get_near_names(pattern, known)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there is {known[0]}"
            raise UserError(f"{key} ({pattern!r}) matches no name of a tensor; {hint}")
