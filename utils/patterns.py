"""Patterns over dotted names, such as those of a model's tensors: `*` stands for any text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from utils.errors import UserError, get_near_names


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether any of the patterns is one of the whole name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def get_first_match(name: str, values: Mapping[str, float], default: float) -> float:
    """The value of the first pattern that matches a name; the default where none does."""
    return next((value for old, value in values.items() if fnmatchcase(name, old)), default)


def rename(name: str, rules: Mapping[str, str]) -> str:
    """The name by the first rule that matches it: each `*` of the new name takes the old one's.

    >>> rename("encoder.layer.3.mlp", {"encoder.layer.*": "blocks.*"})
    'blocks.3.mlp'
    """
    for old, new in rules.items():
        found = re.fullmatch("(.*)".join(re.escape(part) for part in old.split("*")), name)
        if found:
            texts = [*found.groups()[: new.count("*")], ""]
            return "".join(map("".join, zip(new.split("*"), texts, strict=True)))
    return name


def check_rules(key: str, rules: Mapping[str, str], names: Iterable[str]) -> None:
    """Refuse rules of `rename` that match nothing, or ask for texts that they do not have.

    Raises:
      UserError: names the rule.
    """
    check_patterns(key, tuple(rules), names)
    for old, new in rules.items():
        if new.count("*") > old.count("*"):
            raise UserError(
                f"{key} ({old!r}: {new!r}) has more * on the right than texts on the left; write "
                "as many"
            )


def check_patterns(key: str, patterns: Sequence[str], names: Iterable[str]) -> None:
    """Refuse a pattern that matches none of the names: it is misspelt, and would do nothing.

    Args:
      key: the configuration's, for errors.

    Raises:
      UserError: names the pattern, and names that are near.
    """
    known = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            near = get_near_names(pattern, known)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there is {known[0]}"
            raise UserError(f"{key} ({pattern!r}) matches no name of a tensor; {hint}")
