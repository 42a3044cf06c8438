"""Compares the class names of two sides: weights, datasets, teachers, cached logits.

A class number means the same class only if both sides number their classes alike. ImageNet's
classes have two names, a WordNet number and a description, which count as equal.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from utils.errors import UserError
from utils.json_types import JsonMapping
from utils.log import get_logger

if TYPE_CHECKING:
    from timm.data import ImageNetInfo

# Value of a class map: classes are mapped by their names.
BY_NAME = "by_name"
Names = Sequence[str] | None
_LISTED = 5  # names in a message at most


@dataclass(frozen=True)
class ClassSide:
    """The classes of one side."""

    owner: str  # their owner in messages: `run.resume ('runs/a')`
    names: Names  # in the order of the class numbers, or None if unknown


@dataclass(frozen=True)
class ClassMatch:
    """How the classes of one side correspond to those of another."""

    # `equal`; `permuted`: the same names in another order; `other`: a name is missing on one side,
    # or occurs twice there; `one_sided`: one side has no names; `unnamed`: both.
    outcome: Literal["equal", "permuted", "other", "one_sided", "unnamed"]
    # For each class of the first side the class of that name of the second, or -1; empty if a side
    # has no names.
    numbers: tuple[int, ...] = ()
    missing: tuple[str, ...] = ()  # names of the first side that the second lacks
    # Names of the first side that several classes of the second have.
    ambiguous: tuple[str, ...] = ()


def match_class_names(own: Names, other: Names) -> ClassMatch:
    """Compare the names of two sides' classes; see `ClassMatch`."""
    if own is None or other is None:
        return ClassMatch("unnamed" if own is other else "one_sided")
    mine, theirs = _unify(tuple(own), tuple(other))
    if mine == theirs:
        return ClassMatch("equal", tuple(range(len(mine))))
    numbers = {name: number for number, name in enumerate(theirs)}
    twice = {name for side in (theirs, other) for name, n in Counter(side).items() if n > 1}
    matched, missing, ambiguous = list[int](), list[str](), list[str]()
    for name, unified in zip(own, mine, strict=True):
        if name in twice or unified in twice:
            ambiguous.append(name)
        elif unified not in numbers:
            missing.append(name)
        matched.append(-1 if name in twice or unified in twice else numbers.get(unified, -1))
    outcome = "permuted" if sorted(matched) == list(range(len(theirs))) else "other"
    return ClassMatch(outcome, tuple(matched), tuple(missing), tuple(ambiguous))


def require_same_classes(own: ClassSide, other: ClassSide, *, way: str, by_name: str = "") -> None:
    """Refuse sides whose class numbers mean different classes; warn if one side has no names.

    `way` is the way out in errors, `by_name` that if only the order differs.
    """
    warn_if_one_sided(own, other)
    outcome = match_class_names(own.names, other.names).outcome
    if outcome in ("permuted", "other"):
        way = by_name if outcome == "permuted" and by_name else way
        raise UserError(f"{describe_difference(own, other)}; {way}")


def map_classes_by_name(own: ClassSide, other: ClassSide, way: str) -> tuple[int, ...]:
    """Return for each own class the number of the other's class of that name; else UserError."""
    for side in (own, other):
        if side.names is None:
            raise UserError(f"{side.owner} has no class names to map by; {way}")
    match = match_class_names(own.names, other.names)
    lost = match.missing or match.ambiguous
    if lost:
        words = "unknown to" if match.missing else "names of several classes of"
        raise UserError(
            f"{len(lost)} of the {len(match.numbers)} classes of {own.owner} are {words} "
            f"{other.owner}, first {lost[0]!r} (known there: {_list_some(other.names or ())}); "
            f"{way}"
        )
    return match.numbers


def warn_if_one_sided(own: ClassSide, other: ClassSide) -> None:
    """Warn if only one side has names, so that classes are matched by number."""
    if words := describe_one_sided(own, other):
        get_logger().warning("%s", words)


def describe_one_sided(own: ClassSide, other: ClassSide) -> str:
    """Return a warning if only one side has names; else an empty text."""
    if (own.names is None) == (other.names is None):
        return ""
    named, bare = (own, other) if own.names is not None else (other, own)
    return (
        f"{bare.owner} has no class names and {named.owner} has ({_list_some(named.names or ())}): "
        "classes are matched by number alone; make sure that both have the same order"
    )


def describe_difference(own: ClassSide, other: ClassSide) -> str:
    """Describe the difference of two sides: how many names, and the first of them."""
    mine, theirs = tuple(own.names or ()), tuple(other.names or ())
    match = match_class_names(theirs, mine)
    if match.outcome == "permuted":
        first = next(i for i, number in enumerate(match.numbers) if i != number)
        return (
            f"{other.owner} has the {len(mine)} classes of {own.owner} in another order: class "
            f"{first} is {theirs[first]!r} there and {mine[first]!r} here"
        )
    if match.missing:
        return (
            f"{other.owner} has other classes than {own.owner}: {len(match.missing)} of its "
            f"{len(theirs)} names are unknown here, first {match.missing[0]!r} (known here: "
            f"{_list_some(mine)})"
        )
    missing = match_class_names(mine, theirs).missing
    words = f"{(match.ambiguous or mine)[0]!r} is the name of several classes"
    if missing:
        words = f"{len(missing)} of its {len(mine)} names are missing there, first {missing[0]!r}"
    return f"{own.owner} has other classes than {other.owner}: {words}"


def read_class_names(facts: JsonMapping, count: int, *, is_public: bool) -> tuple[str, ...] | None:
    """Read the names of a model's `count` classes from its facts; None if unknown.

    Weights without names that timm shares (`is_public`) have those of an ImageNet set of that size.
    """
    names = facts.get("classes")
    if isinstance(names, list) and len(names) == count:
        return tuple(map(str, names))
    info = _find_imagenet(count) if is_public else None
    return None if info is None else tuple(info.label_descriptions())


def get_label_names(names: Names) -> tuple[str, ...] | None:
    """Return names as datasets write them: WordNet numbers for ImageNet's descriptions."""
    if names is None:
        return None
    info = _find_imagenet(len(names))
    if info is not None and tuple(names) == tuple(info.label_descriptions()):
        return tuple(info.label_names())
    return tuple(names)


def _unify(own: tuple[str, ...], other: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Convert both sides to WordNet numbers if one has them or is all of ImageNet."""
    sides = tuple(get_label_names(side) or () for side in (own, other))
    if sides[0] == sides[1]:
        return sides[0], sides[1]
    whole = next((side for side in sides if _is_wordnet(side) and _find_imagenet(len(side))), ())
    info = _find_imagenet(len(whole) or 1000)
    if info is None or not any(map(_is_wordnet, sides)):
        return own, other
    descriptions = info.label_descriptions()
    pairs = zip(descriptions, info.label_names(), strict=True)
    counts = Counter(descriptions)
    numbers = {text: name for text, name in pairs if counts[text] == 1}
    first, second = (tuple(numbers.get(name, name) for name in side) for side in sides)
    return first, second


def _is_wordnet(names: Sequence[str]) -> bool:
    return any(re.fullmatch(r"n\d{8}", name) for name in names)


@functools.cache
def _find_imagenet(count: int) -> ImageNetInfo | None:
    """Return the ImageNet set with so many classes, from timm's files; or None."""
    from timm.data import ImageNetInfo, infer_imagenet_subset

    subset = infer_imagenet_subset({"num_classes": count})
    return None if subset is None else ImageNetInfo(subset)


def _list_some(names: Sequence[str]) -> str:
    listed = ", ".join(map(repr, names[:_LISTED]))
    return listed if len(names) <= _LISTED else f"{listed}, ..."
