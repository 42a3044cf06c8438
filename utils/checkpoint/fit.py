"""Compares tensors with those of a model, by name, shape and type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_NAMED = 8  # names in an error's one line
# The shape of a tensor and the name of its type, such as "float32".
Kind = tuple[tuple[int, ...], str]
# [shape, type, ...] of a tensor as JSON holds it.
Entry = list[Any]
Table = dict[str, Entry]


@dataclass(frozen=True)
class TensorDiff:
    """What keeps tensors by name from fitting a model's own.

    Attributes:
      missing: names that only the model has.
      unexpected: names that the model does not have.
      different: name -> what was found, and what the model has.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    different: dict[str, tuple[Kind, Kind]]

    def __len__(self) -> int:
        return len(self.missing) + len(self.unexpected) + len(self.different)

    def summary(self) -> str:
        """How many of each sort there are, and the first names."""
        sorts = (
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("different", self._describe_different()),
        )
        out = []
        for word, names in sorts:
            if names:
                more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
                out.append(f"{len(names)} {word}: {', '.join(names[:_NAMED])}{more}")
        return "; ".join(out)

    def _describe_different(self) -> list[str]:
        return [
            "{} {} {} instead of {} {}".format(name, *found, *own)
            for name, (found, own) in self.different.items()
        ]


def compare_tensors(
    own: Mapping[str, Tensor | Entry], found: Mapping[str, Tensor | Entry], *, exact: bool = True
) -> TensorDiff:
    """How tensors by name, or the [shape, type, ...] entries of a table, differ from a model's own.

    Args:
      exact: False lets one floating type stand for another, and one type of integers too.
    """
    own_kinds = {name: get_kind(value) for name, value in own.items()}
    found_kinds = {name: get_kind(value) for name, value in found.items()}
    return TensorDiff(
        missing=tuple(name for name in own_kinds if name not in found_kinds),
        unexpected=tuple(name for name in found_kinds if name not in own_kinds),
        different={
            name: (found_kinds[name], kind)
            for name, kind in own_kinds.items()
            if name in found_kinds and not _is_alike(found_kinds[name], kind, exact=exact)
        },
    )


def get_kind(value: Tensor | Entry) -> Kind:
    """The kind of a tensor, or of the entry of a table."""
    if isinstance(value, Tensor):
        return tuple(value.shape), str(value.dtype).removeprefix("torch.")
    return tuple(value[0]), value[1]


def _is_alike(first: Kind, second: Kind, *, exact: bool) -> bool:
    if exact or first == second:
        return first == second
    is_floating, is_wanted = (getattr(torch, name).is_floating_point for _, name in (first, second))
    return first[0] == second[0] and is_floating == is_wanted
