"""Compares the class names of two sides: weights, datasets, teachers, stored answers.

A class number means a class only as long as both sides number their classes alike. ImageNet's
classes go by two names, their WordNet numbers and their descriptions, which count as equal.
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

# Written in place of a map of numbers: classes are mapped by their names.
BY_NAME = "by_name"
Names = Sequence[str] | None
_WORDNET = re.compile(r"n\d{8}")
# Names that a message lists at most.
_LISTED = 5


@dataclass(frozen=True)
class ClassSide:
    """The classes of one side.

    Args:
      owner: what has them, as a message names it: `run.resume ('runs/a')`.
      names: in the order of the class numbers, or None if they are unknown.
    """

    owner: str
    names: Names


@dataclass(frozen=True)
class ClassMatch:
    """How the classes of one side correspond to those of another.

    Args:
      outcome: `equal`; `permuted`: the same names in another order; `other`: a name is missing on
        one side, or stands there twice; `one_sided`: one side has no names; `unnamed`: neither has.
      numbers: for each class of the first side the class of that name of the second, or -1; empty
        if a side has no names.
      missing: names of the first side that the second lacks.
      ambiguous: names of the first side that several classes of the second have.
    """

    outcome: Literal["equal", "permuted", "other", "one_sided", "unnamed"]
    numbers: tuple[int, ...] = ()
    missing: tuple[str, ...] = ()
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
    found, missing, ambiguous = [], [], []
    for name, unified in zip(own, mine, strict=True):
        if name in twice or unified in twice:
            ambiguous.append(name)
        elif unified not in numbers:
            missing.append(name)
        found.append(-1 if name in twice or unified in twice else numbers.get(unified, -1))
    is_permuted = sorted(found) == list(range(len(theirs)))
    outcome = "permuted" if is_permuted else "other"
    return ClassMatch(outcome, tuple(found), tuple(missing), tuple(ambiguous))


def require_same_classes(own: ClassSide, other: ClassSide, *, way: str, by_name: str = "") -> None:
    """Refuse sides whose class numbers mean different classes; warn if one side has no names.

    Args:
      own: what the run has.
      other: what is brought to it.
      way: what to do where the names are others.
      by_name: what maps classes by name where only their order differs; empty: as `way`.

    Raises:
      UserError: the names, or their order, are not those of the other side.
    """
    warn_if_one_sided(own, other)
    match = match_class_names(own.names, other.names)
    if match.outcome in ("permuted", "other"):
        is_permuted = match.outcome == "permuted"
        raise UserError(
            f"{describe_difference(own, other)}; {by_name if is_permuted and by_name else way}"
        )


def map_classes_by_name(own: ClassSide, other: ClassSide, way: str) -> tuple[int, ...]:
    """Map each class of the first side to the number of the class of that name of the second.

    Args:
      way: what to do where they cannot be mapped.

    Raises:
      UserError: a side has no names, or the second side lacks one or has it twice.
    """
    for side in (own, other):
        if side.names is None:
            raise UserError(f"{side.owner} has no class names to map by; {way}")
    match = match_class_names(own.names, other.names)
    lost = match.missing or match.ambiguous
    if lost:
        words = "unknown to" if match.missing else "names of several classes of"
        known = _list_some(other.names or ())
        raise UserError(
            f"{len(lost)} of the {len(match.numbers)} classes of {own.owner} are {words} "
            f"{other.owner}, first {lost[0]!r} (known there: {known}); {way}"
        )
    return match.numbers


def warn_if_one_sided(own: ClassSide, other: ClassSide) -> None:
    """Warn in one line that class numbers alone are compared, as one side has no names."""
    if words := describe_one_sided(own, other):
        get_logger().warning("%s", words)


def describe_one_sided(own: ClassSide, other: ClassSide) -> str:
    """Say that class numbers alone are compared, if one side has names and the other has not."""
    if (own.names is None) == (other.names is None):
        return ""
    named, bare = (own, other) if own.names is not None else (other, own)
    return (
        f"{bare.owner} has no class names and {named.owner} has ({_list_some(named.names or ())}): "
        "classes are matched by number alone; make sure that both have the same order"
    )


def describe_difference(own: ClassSide, other: ClassSide) -> str:
    """Say in what the classes of two sides differ: how many names, and the first of them."""
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
    """Read the names of a model's classes from what its weights tell, or None if unknown.

    Args:
      count: of the model's classes.
      is_public: whether weights without names are those of a model that timm shares: as many
        classes as one of ImageNet's sets has are that set's.
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
    """Bring both sides to WordNet numbers where one has them or is all of ImageNet."""
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
    return any(_WORDNET.fullmatch(name) for name in names)


@functools.cache
def _find_imagenet(count: int) -> ImageNetInfo | None:
    """Find the set of ImageNet that has so many classes; timm reads its files for it."""
    from timm.data import ImageNetInfo, infer_imagenet_subset

    subset = infer_imagenet_subset({"num_classes": count})
    return None if subset is None else ImageNetInfo(subset)


def _list_some(names: Sequence[str]) -> str:
    listed = ", ".join(map(repr, names[:_LISTED]))
    return listed if len(names) <= _LISTED else f"{listed}, ..."
