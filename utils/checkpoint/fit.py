"""Compares tensors with those of a model by name, shape and type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_NAMED = 8  # names in an error's one line
# The shape of a tensor and the name of its type, such as "float32".
Kind = tuple[tuple[int, ...], str]
# Shape, type and checksum of a tensor, as a checkpoint's table holds them.
Entry = tuple[list[int], str, str]
Table = dict[str, Entry]


@dataclass(frozen=True)
class TensorDiff:
    """Differences between tensors and those of a model."""

    missing: tuple[str, ...]  # names that only the model has
    unexpected: tuple[str, ...]  # names that the model does not have
    different: dict[str, tuple[Kind, Kind]]  # name -> kind of the tensor, kind in the model

    def __len__(self) -> int:
        return len(self.missing) + len(self.unexpected) + len(self.different)

    def summary(self) -> str:
        """Format the number of differences of each sort, and the first names."""
        different = [
            "{} {} {} instead of {} {}".format(name, *kind, *own)
            for name, (kind, own) in self.different.items()
        ]
        sorts = {"missing": self.missing, "unexpected": self.unexpected, "different": different}
        out = []
        for word, names in sorts.items():
            if names:
                more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
                out.append(f"{len(names)} {word}: {', '.join(names[:_NAMED])}{more}")
        return "; ".join(out)


def compare_tensors(
    own: Mapping[str, Tensor | Entry | Kind],
    other: Mapping[str, Tensor | Entry | Kind],
    *,
    exact: bool = True,
) -> TensorDiff:
    """Compare tensors or table entries by name with a model's; `exact` also compares widths."""
    kinds = {name: (get_kind(other[name]), get_kind(own[name])) for name in own if name in other}
    return TensorDiff(
        missing=tuple(name for name in own if name not in other),
        unexpected=tuple(name for name in other if name not in own),
        different={name: kind for name, kind in kinds.items() if not _fits(*kind, exact=exact)},
    )


def get_kind(value: Tensor | Entry | Kind) -> Kind:
    if isinstance(value, Tensor):
        return tuple(value.shape), str(value.dtype).removeprefix("torch.")
    return tuple(value[0]), value[1]


def _fits(first: Kind, second: Kind, *, exact: bool) -> bool:
    # Without `exact`, one floating type may stand for another, and one integer type.
    if exact or first == second:
        return first == second
    is_floating, is_wanted = (getattr(torch, name).is_floating_point for _, name in (first, second))
    return first[0] == second[0] and is_floating == is_wanted
