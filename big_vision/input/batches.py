"""What travels from a reader to a task: `Batch` and its kinds, plain dataclasses of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Self

import torch
from torch import Tensor

# Among the draws of images with several right labels: float32 [B, K], 1 for each of them.
RIGHT = "right"


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One rank's part of a global batch, or a micro-batch of it; a kind of batch adds its tensors.

    Every tensor of a kind has the examples in its first axis, alone or in a mapping. What is to
    travel with a batch is put in by `dataclasses.replace`.

    Attributes:
      mask: [B] bool, False on padding.
      indices: [B] int64, the example's index in the split whatever the order; -1 on padding.
      ids: names of the examples with data.return_id; empty on padding.
      draws: [B, ...] tensors that were drawn or looked up for each example.
      values: tensors of the step as a whole, of any shape; never split, alike on all devices.
      is_last: whether this is the last micro-batch of its optimizer step.
    """

    mask: Tensor
    indices: Tensor
    ids: tuple[str, ...] | None = None
    draws: Mapping[str, Tensor] = field(default_factory=dict)
    values: Mapping[str, Tensor] = field(default_factory=dict)
    is_last: bool = True

    def __len__(self) -> int:
        """Examples, padding included."""
        return len(self.mask)

    def get_tensors(self) -> dict[str, Tensor]:
        """What a kind of batch holds of every example, mask and indices among it, by name."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def map(
        self, fn: Callable[[Tensor], Tensor], of_step: Callable[[Tensor], Tensor] | None = None
    ) -> Self:
        """The batch with `fn` applied to every tensor of examples: the way to a device.

        Args:
          of_step: what is applied to `values`; none: they stay as they are.
        """
        changed = {
            one.name: _apply(fn, getattr(self, one.name))
            for one in fields(self)
            if one.name != "values"
        }
        if of_step is not None:
            changed["values"] = _apply(of_step, self.values)
        return replace(self, **changed)

    def append(self, other: Self) -> Self:
        """The examples of both, in that order; values of the step are this batch's."""
        theirs = {one.name: getattr(other, one.name) for one in fields(other)}
        changed = {
            name: _join(getattr(self, name), value)
            for name, value in theirs.items()
            if name != "values"
        }
        return replace(self, **changed)

    def split(self, parts: int, blocks: int = 1) -> list[Self]:
        """Micro-batches of equal size; each takes its share of every block.

        Args:
          blocks: contiguous parts of the batch that lie on different devices; examples would move
            between devices if a micro-batch were not cut out of each of them.

        The examples must divide: `job.check.check_split` has refused a batch that does not.
        """
        size, rest = divmod(len(self), parts * blocks)
        assert not rest, f"{len(self)} examples for {parts} parts of {blocks} blocks"
        if parts == 1:
            return [self]
        return [
            replace(
                self.map(lambda tensor, part=part: _cut(tensor, part, size, blocks)),
                ids=None if self.ids is None else _cut_names(self.ids, part, size, blocks),
                is_last=self.is_last and part == parts - 1,
            )
            for part in range(parts)
        ]


@dataclass(frozen=True, kw_only=True)
class ImageBatch(Batch):
    """Labelled images.

    Attributes:
      images: [B, H, W, C] uint8.
      labels: [B] int32; 0 on padding. Of several right ones the first by number.
    """

    images: Tensor
    labels: Tensor


@dataclass(frozen=True, kw_only=True)
class TokenBatch(Batch):
    """Windows of a text.

    Attributes:
      tokens: [B, T + 1] int32: T inputs and, one place later, what follows each of them.
    """

    tokens: Tensor


@dataclass(frozen=True, kw_only=True)
class VectorBatch(Batch):
    """Rows of a table.

    Attributes:
      inputs: [B, D] float32.
      targets: [B, O] float32.
    """

    inputs: Tensor
    targets: Tensor


def _apply(fn: Callable[[Tensor], Tensor], value: object) -> object:
    """A field with `fn` applied to its tensors; what holds none stays."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, Mapping):
        return {name: fn(tensor) for name, tensor in value.items()}
    return value


def _join(mine: object, theirs: object) -> object:
    """A field of two batches: tensors and names of examples one after the other."""
    if isinstance(mine, Tensor):
        return torch.cat([mine, theirs])
    if isinstance(mine, Mapping):
        return {name: torch.cat([tensor, theirs[name]]) for name, tensor in mine.items()}
    return mine + theirs if isinstance(mine, tuple) else mine


def _cut(tensor: Tensor, part: int, size: int, blocks: int) -> Tensor:
    """Examples part * size and following of each block."""
    in_blocks = tensor.reshape(blocks, -1, *tensor.shape[1:])
    return in_blocks[:, part * size : (part + 1) * size].reshape(-1, *tensor.shape[1:])


def _cut_names(names: tuple[str, ...], part: int, size: int, blocks: int) -> tuple[str, ...]:
    length = len(names) // blocks
    starts = [block * length + part * size for block in range(blocks)]
    return tuple(name for start in starts for name in names[start : start + size])
