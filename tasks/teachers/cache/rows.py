"""`Column` and `CacheShape`: parts of a row of stored outputs, and their precision.

A row is an example's: the columns one after the other, then a byte made of the example's index, by
which every batch is checked to be the one that was stored. A column of classes holds k
log-probabilities, k class numbers (the smallest unsigned type) and the logarithm of the remaining
mass (float16), a column of features its numbers. Of text, or of patches, a row holds the outputs at
all positions. int8 means 256 levels between the least and the greatest number of an output, which
stand beside them as float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from utils.errors import UserError

CLASSES, FEATURES = "classes", "features"
_STORED = {"float16": "<f2", "bfloat16": "<u2", "int8": "u1"}
_LEVELS = 255


@dataclass(frozen=True)
class AnswerForm:
    """Form of a teacher's output for an example, as far as a cache can store it."""

    # `classes`: logits, of which the k best are kept; `features`: numbers, kept whole.
    kind: Literal["classes", "features"]
    width: int  # K classes, or D numbers
    places: int = 0  # outputs for an example, of which a window of text has many; 0: a single one
    # Which of a teacher's features: `pooled`, `patches`; empty: it has only one kind.
    part: str = ""
    # Number of the teacher in the order of the configuration; None: each one.
    teacher: int | None = None


# Name, type and shape of a field of a row.
Field = tuple[str, str | np.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class Column:
    """Stored outputs of one teacher for each example; further fields as in `AnswerForm`."""

    teacher: str  # its hash
    kind: str
    width: int
    top_k: int = 0  # classes stored; 0: none, they are features
    places: int = 0
    part: str = ""
    dtype: str = "float16"  # of the stored numbers: float16, bfloat16 or int8
    name: str = ""  # of the teacher, for messages
    weight: float = 1.0  # its share in an ensemble

    @property
    def index_dtype(self) -> np.dtype:
        """Smallest unsigned type that holds a class number."""
        return np.min_scalar_type(max(self.width - 1, 0))

    @property
    def numbers(self) -> int:
        """Numbers stored of one output."""
        return self.top_k if self.kind == CLASSES else self.width

    def list_fields(self, number: int) -> list[Field]:
        places = (self.places,) if self.places else ()
        fields: list[Field] = [(f"values{number}", _STORED[self.dtype], (*places, self.numbers))]
        if self.kind == CLASSES:
            fields.append((f"indices{number}", self.index_dtype, (*places, self.top_k)))
            fields.append((f"rest{number}", "<f2", places))
        if self.dtype == "int8":
            fields.append((f"bounds{number}", "<f4", (*places, 2)))
        return fields


Columns = Sequence[Column]


@dataclass(frozen=True)
class CacheShape:
    """Sizes of a cache."""

    columns: tuple[Column, ...]
    epochs: int  # stored epochs, which are so many augmentations of each example
    steps_per_epoch: int  # global batches of an epoch
    global_batch_size: int  # examples of a global batch
    steps: int | None = None  # global batches stored if the last epoch is not whole; None: all

    @property
    def total_steps(self) -> int:
        """Global batches stored."""
        return self.epochs * self.steps_per_epoch if self.steps is None else self.steps

    def count_steps(self, epoch: int) -> int:
        """Count global batches of an epoch that are stored."""
        return min(self.total_steps - epoch * self.steps_per_epoch, self.steps_per_epoch)

    @property
    def row_dtype(self) -> np.dtype:
        """Type of one example's row, packed."""
        fields = [field for n, column in enumerate(self.columns) for field in column.list_fields(n)]
        return np.dtype([*fields, ("example", "u1", ())])

    @property
    def total_bytes(self) -> int:
        return self.total_steps * self.global_batch_size * self.row_dtype.itemsize


def condense_answers(logits: Tensor, top_k: int) -> Tensor:
    """Shorten logits [..., K] to float [..., 2 k + 1] for a cache, on the device.

    They are k log-probabilities, their k classes, which float32 holds exactly up to 2^24, and the
    rest of the mass.
    """
    exact = logits if logits.dtype == torch.float64 else logits.float()
    log_probs = torch.log_softmax(exact, dim=-1)
    best, indices = log_probs.topk(top_k, dim=-1)
    rest = (1.0 - best.exp().sum(dim=-1, keepdim=True)).clamp(min=0.0)
    return torch.cat([best, indices.to(best.dtype), rest], dim=-1)


def pack_rows(
    answers: Sequence[Tensor], shape: CacheShape, examples: Tensor | None = None
) -> np.ndarray:
    """Return rows [B] of the outputs for a batch, on the host.

    `answers` are for each column in its order logits by `condense_answers`, or features [B, D], [B,
    places, D] as they are; `examples` int [B] are indices in the split, None: rows fit any example.
    UserError if an output is no finite number, or its type cannot hold it.
    """
    rows = np.zeros(len(answers[0]), shape.row_dtype)
    for number, (column, answer) in enumerate(zip(shape.columns, answers, strict=True)):
        values = take_values(column, answer)
        _pack_values(rows, number, column, values)
        if column.kind == CLASSES:
            indices = answer[..., column.top_k : 2 * column.top_k]
            has_all = column.top_k == column.width
            rest = torch.zeros_like(answer[..., -1]) if has_all else answer[..., -1]
            rows[f"indices{number}"] = indices.numpy()
            rows[f"rest{number}"] = rest.log().numpy()
    if examples is not None:
        rows["example"] = compute_marks(examples)
    return rows


def take_values(column: Column, answer: Tensor) -> np.ndarray:
    """Return the numbers of an output that a column stores in its own type."""
    kept = answer[..., : column.top_k] if column.kind == CLASSES else answer
    return kept.float().numpy() if kept.dtype != torch.float64 else kept.numpy()


def unpack_values(rows: np.ndarray, number: int, column: Column) -> np.ndarray:
    """Return float32 numbers [B, ...] of a column."""
    stored = np.ascontiguousarray(rows[f"values{number}"])
    if column.dtype == "float16":
        return stored.astype(np.float32)
    if column.dtype == "bfloat16":
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    low, high = np.split(rows[f"bounds{number}"], 2, axis=-1)
    return low + stored.astype(np.float32) * ((high - low) / np.float32(_LEVELS))


def measure_errors(
    rows: np.ndarray, answers: Sequence[Tensor], shape: CacheShape
) -> list[tuple[float, float, int]]:
    """Measure storage errors: for each column the greatest one, their sum and their number.

    In nats of log-probability, or in the units of the features.
    """
    errors = []
    for number, (column, answer) in enumerate(zip(shape.columns, answers, strict=True)):
        gaps = np.abs(unpack_values(rows, number, column) - take_values(column, answer))
        errors.append((float(gaps.max()), float(gaps.sum(dtype=np.float64)), gaps.size))
    return errors


def compute_marks(examples: Tensor) -> np.ndarray:
    """Compute [B] uint8 of 1..255: a byte of a multiplicative hash of each example's index."""
    mixed = examples.cpu().numpy().astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(40)) % np.uint64(255) + np.uint64(1)


def _pack_values(rows: np.ndarray, number: int, column: Column, values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        raise UserError(
            f"distill.teacher {column.name or column.teacher!r} gives outputs that are not finite; "
            "check its weights, its mean and std, and its dtype"
        )
    if column.dtype == "int8":
        rows[f"values{number}"], rows[f"bounds{number}"] = _to_levels(values)
    elif column.dtype == "bfloat16":
        bits = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16)
        rows[f"values{number}"] = bits.numpy().view(np.uint16)
    else:
        with np.errstate(over="ignore"):
            rows[f"values{number}"] = values
        if not np.isfinite(rows[f"values{number}"]).all():
            raise UserError(
                f"--dtype float16 does not hold outputs up to {np.abs(values).max():.4g} of "
                f"{column.name or column.teacher!r}; choose bfloat16 or int8"
            )


def _to_levels(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each output's numbers as 0..255 between its least and its greatest, and these two."""
    bounds = np.stack([values.min(axis=-1), values.max(axis=-1)], axis=-1).astype(np.float32)
    low, high = np.split(bounds, 2, axis=-1)
    step = np.maximum((high - low) / np.float32(_LEVELS), np.finfo(np.float32).tiny)
    return np.clip(np.rint((values - low) / step), 0, _LEVELS).astype(np.uint8), bounds
