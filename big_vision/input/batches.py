"""Defines what a reader passes to a task: `Batch` and its kinds, plain dataclasses of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

# Key among the draws of images with several right labels: float32 [B, K], 1 for each of them.
RIGHT = "right"
Field = Tensor | Mapping[str, Tensor] | tuple[str, ...] | bool | None


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One rank's part of a global batch, or a micro-batch of it; a kind of batch adds its tensors.

    Every tensor of a kind has the examples in its first axis, alone or in a mapping. Use
    `dataclasses.replace` to add what should travel with a batch.
    """

    mask: Tensor  # [B] bool, False on padding
    indices: Tensor  # [B] int64, the example's index in the split whatever the order; -1 on padding
    # Names of the examples with data.return_id; empty on padding
    ids: tuple[str, ...] | None = None
    # [B, ...] tensors that were drawn or looked up for each example
    draws: Mapping[str, Tensor] = field(default_factory=dict)
    # Tensors of the step as a whole, of any shape; never split, equal on all devices
    values: Mapping[str, Tensor] = field(default_factory=dict)
    is_last: bool = True  # True for the last micro-batch of its optimizer step

    def __len__(self) -> int:
        """Return the number of examples, padding included."""
        return len(self.mask)

    def get_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of all examples by name, mask and indices among them."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def map(
        self, fn: Callable[[Tensor], Tensor], of_step: Callable[[Tensor], Tensor] | None = None
    ) -> Self:
        """Apply `fn` to every tensor of examples, such as the copy to a device.

        Args:
          of_step: applied to `values`; None leaves them unchanged.
        """
        changed = {
            item.name: _apply(fn, getattr(self, item.name))
            for item in fields(self)
            if item.name != "values"
        }
        if of_step is not None:
            changed["values"] = _apply(of_step, self.values)
        return replace(self, **changed)

    def append(self, other: Self) -> Self:
        """Append the examples of another batch; values of the step are this batch's."""
        changed = {
            item.name: _join(getattr(self, item.name), getattr(other, item.name))
            for item in fields(other)
            if item.name != "values"
        }
        return replace(self, **changed)

    def split(self, parts: int, blocks: int = 1) -> list[Self]:
        """Split into micro-batches of equal size; each takes its share of every block.

        Args:
          blocks: contiguous parts of the batch on different devices; a micro-batch is cut out of
            each of them, so that no example moves between devices.

        The examples must divide: `job.check.check_split` refuses a batch that does not.
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
    """Labelled images."""

    images: Tensor  # [B, H, W, C] uint8
    labels: Tensor  # [B] int32; 0 on padding; the lowest of several right ones


@dataclass(frozen=True, kw_only=True)
class TokenBatch(Batch):
    """Windows of a text."""

    # [B, T + 1] int32: T inputs and, one position later, the token after each of them
    tokens: Tensor


@dataclass(frozen=True, kw_only=True)
class VectorBatch(Batch):
    """Rows of a table."""

    inputs: Tensor  # [B, D] float32
    targets: Tensor  # [B, O] float32


def _apply(fn: Callable[[Tensor], Tensor], value: Field) -> Field:
    """Apply `fn` to the tensors of a field."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, Mapping):
        return {name: fn(tensor) for name, tensor in value.items()}
    return value


def _join(mine: Any, theirs: Any) -> Any:
    """Concatenate a field of two batches: tensors and names of examples."""
    if isinstance(mine, Tensor):
        return torch.cat([mine, theirs])
    if isinstance(mine, Mapping):
        return {name: torch.cat([tensor, theirs[name]]) for name, tensor in mine.items()}
    return mine + theirs if isinstance(mine, tuple) else mine


def _cut(tensor: Tensor, part: int, size: int, blocks: int) -> Tensor:
    """Return examples part * size and following of each block."""
    in_blocks = tensor.reshape(blocks, -1, *tensor.shape[1:])
    return in_blocks[:, part * size : (part + 1) * size].reshape(-1, *tensor.shape[1:])


def _cut_names(names: tuple[str, ...], part: int, size: int, blocks: int) -> tuple[str, ...]:
    length = len(names) // blocks
    starts = [block * length + part * size for block in range(blocks)]
    return tuple(name for start in starts for name in names[start : start + size])
