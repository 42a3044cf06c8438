"""A mixture of datasets: `data.mix`, drawn by weights in one exact order.

The examples of all members are numbered in a row. Each member has a reader of its own, which
follows the order of the whole and leaves out the other members; batches are joined by place.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from big_vision.input.order import Sampling
from big_vision.input.sampling import require_labels, weigh_by_class
from big_vision.input.selection import ImageSelection, Selection
from big_vision.input.source import ExactReader, ExampleFacts, Known, Reader, Reading, Role, Source
from utils.errors import UserError

if TYPE_CHECKING:
    from big_vision.input.batches import Batch
    from utils.config.data import DataSection

# Numbers of augmentations of a member: those of different members draw their crops independently.
_AUGMENTATIONS = 16


@dataclass(frozen=True, kw_only=True)
class MixSelection(ImageSelection):
    """The examples of all members; classes are None if they are no images."""

    members: tuple[Selection, ...]

    @property
    def starts(self) -> np.ndarray:
        """[M] int64: the number of each member's first example."""
        counts = np.array([member.num_examples for member in self.members])
        return np.cumsum(counts) - counts

    @property
    def files_hash(self) -> str:
        text = " ".join(member.files_hash for member in self.members)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def count_common(self, other: Selection) -> int:
        """Count the examples that any member shares with another selection of its kind."""
        return sum(m.count_common(other) for m in self.members if type(m) is type(other))


class MixSource(Source[Selection]):
    """The datasets of data.mix in training, and that of data.name in evaluation.

    Args:
      create: creates the source of a section.
    """

    def __init__(
        self, data: DataSection, known: Known, create: Callable[[DataSection], Source[Selection]]
    ) -> None:
        super().__init__(data, known)
        plain = data.model_dump() | {"mix": ()}
        self._base = create(type(data).model_validate(plain))
        self.names: list[str] = []
        self.members: list[Source[Selection]] = []
        for number, member in enumerate(data.mix):
            own = {
                "source": member.source,
                "name": member.name,
                "root": member.root,
                "train_split": member.split,
                "train_pp": member.pp,
                "image_key": member.image_key,
                "label_key": member.label_key,
            }
            given = {key: value for key, value in own.items() if value}
            self.names.append(f"data.mix[{number}] ({member.name or data.name or data.source})")
            with self._name_member(number):
                self.members.append(create(type(data).model_validate(plain | given)))

    @property
    def title(self) -> str:
        return " + ".join(member.title for member in self.members)

    def choose_order(self) -> str:
        orders = [source.choose_order() for source in (self._base, *self.members)]
        return "sharded" if "sharded" in orders else "exact"

    def select(self, role: Role) -> Selection:
        """Select the examples of all members; of evaluation those of data.name."""
        if role != "train":
            return self._base.select(role)
        selections: list[Selection] = []
        for number, source in enumerate(self.members):
            with self._name_member(number):
                selections.append(source.select(role))
        first = selections[0]
        for name, other in zip(self.names, selections, strict=True):
            is_alike = isinstance(first, ImageSelection) == isinstance(other, ImageSelection)
            misfit = other.find_misfit(first, self.names[0]) if is_alike else ""
            if misfit:
                raise UserError(f"{name} {misfit}")
        return MixSelection(
            num_examples=sum(selection.num_examples for selection in selections),
            version=" ".join(selection.version for selection in selections).strip(),
            left_out=sum((selection.left_out for selection in selections), ()),
            num_classes=first.num_classes if isinstance(first, ImageSelection) else None,
            class_names=first.class_names if isinstance(first, ImageSelection) else None,
            several_labels=isinstance(first, ImageSelection) and first.several_labels,
            members=tuple(selections),
        )

    def load_labels(self, selection: Selection) -> np.ndarray | None:
        if not isinstance(selection, MixSelection):
            return self._base.load_labels(selection)
        pairs = zip(self.members, selection.members, strict=True)
        return np.concatenate([require_labels(*pair, "data.mix") for pair in pairs])

    def describe(self, selection: Selection, role: Role) -> ExampleFacts:
        if not isinstance(selection, MixSelection):
            return self._base.describe(selection, role)
        facts: list[ExampleFacts] = []
        for number, source in enumerate(self.members):
            with self._name_member(number):
                facts.append(source.describe(selection.members[number], role))
        check_alike(facts, self.names)
        if (
            self.data.mix
            and any(m.pp for m in self.data.mix)
            and not hasattr(facts[0], "image_shape")
        ):
            raise UserError(f"data.mix pp has no effect on {facts[0].examples}; remove it")
        return facts[0]

    def open(self, selection: Selection, reading: Reading) -> Reader:
        if not isinstance(selection, MixSelection):
            return self._base.open(selection, reading)
        readers: list[Reader] = []
        for number, start in enumerate(selection.starts.tolist()):
            augmentation = reading.augmentation + _AUGMENTATIONS * number
            own = replace(reading, first=start, augmentation=augmentation)
            with self._name_member(number):
                readers.append(self.members[number].open(selection.members[number], own))
        check_alike([reader.facts for reader in readers], self.names)
        return MixReader(readers, selection, reading)

    def weigh(self, selection: MixSelection) -> np.ndarray:
        """Return [num_examples] float64: a member's weight, dealt out by the weights of classes."""
        parts: list[np.ndarray] = []
        for number, (source, own) in enumerate(zip(self.members, selection.members, strict=True)):
            with self._name_member(number):
                each = weigh_by_class(source, own)
            each = np.ones(own.num_examples) if each is None else each
            parts.append(each * (self.data.mix[number].weight / each.sum()))
        return np.concatenate(parts)

    @contextlib.contextmanager
    def _name_member(self, number: int) -> Iterator[None]:
        """Name the member in its errors."""
        try:
            yield
        except UserError as error:
            raise UserError(f"{self.names[number]}: {error}") from error


def create_sampling(source: Source[Selection], selection: Selection) -> Sampling | None:
    """Create the draws of a training split; None if each example comes once in an epoch."""
    if isinstance(source, MixSource):
        assert isinstance(selection, MixSelection)
        return Sampling(source.weigh(selection))
    weights = weigh_by_class(source, selection)
    return None if weights is None else Sampling(weights)


def check_alike(facts: Sequence[ExampleFacts], names: Sequence[str]) -> None:
    """Refuse members whose batches differ in kind, shape, value range or classes."""
    first = facts[0]
    for other, name in zip(facts[1:], names[1:], strict=True):
        if type(other) is not type(first):
            raise UserError(
                f"{name} has {other.examples}, but {names[0]} {first.examples}; mix one kind"
            )
        for field in fields(other):  # pyrefly: ignore[bad-argument-type]  # facts are dataclasses
            mine, theirs = getattr(other, field.name), getattr(first, field.name)
            if mine != theirs and None not in (mine, theirs):
                raise UserError(
                    f"{name} has {field.name} {mine!r}, but {names[0]} {theirs!r}; a mixture needs "
                    "one form of examples: change pp, or leave the dataset out"
                )


class MixReader(ExactReader):
    """Reads the members side by side and puts their examples in the order of the whole."""

    def __init__(
        self, readers: Sequence[Reader], selection: MixSelection, reading: Reading
    ) -> None:
        super().__init__(selection.num_examples, readers[0].facts, reading)
        self._readers, self._starts = readers, selection.starts

    def read_training(self, epoch: int, start: int) -> Iterator[Batch]:
        streams = [_Stream(reader.read_training(epoch, start)) for reader in self._readers]
        size = self._shard.rank_batch_size
        while True:
            order, _ = self._order.get_epoch(epoch, start)
            for members in self._find_members(order).reshape(-1, size):
                counts = np.bincount(members, minlength=len(streams)).tolist()
                yield self._join([*map(_Stream.take, streams, counts)], members)
            epoch, start = epoch + 1, 0

    def read_examples(self, indices: np.ndarray, epoch: int) -> Batch:
        members = self._find_members(indices)
        parts: list[Batch | None] = []
        for number, reader in enumerate(self._readers):
            own = indices[members == number] - self._starts[number]
            parts.append(reader.read_examples(own, epoch) if len(own) else None)
        return self._join(parts, members)

    def create_blank(self, size: int) -> Batch:
        return self._readers[0].create_blank(size)

    def get_ids(self, indices: np.ndarray) -> tuple[str, ...]:
        return tuple(reader.get_ids(np.array([own]))[0] for reader, own in map(self._find, indices))

    def describe(self, index: int) -> str:
        reader, own = self._find(index)
        return reader.describe(own)

    def explain_example(self, epoch: int, index: int) -> UserError:
        reader, own = self._find(index)
        return reader.explain_example(epoch, own)

    def close(self) -> None:
        for reader in self._readers:
            reader.close()

    def _find_members(self, indices: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._starts, indices, side="right") - 1

    def _find(self, index: int) -> tuple[Reader, int]:
        """Return the reader of an example, and its number there."""
        member = int(self._find_members(np.array(index)))
        return self._readers[member], int(index - self._starts[member])

    def _join(self, parts: Sequence[Batch | None], members: np.ndarray) -> Batch:
        """Put the members' examples at the places [B] of their members."""
        joined: Batch | None = None
        for part, start in zip(parts, self._starts.tolist(), strict=True):
            if part is not None:
                part = replace(part, indices=part.indices + start)
                joined = part if joined is None else joined.append(part)
        assert joined is not None
        places = torch.from_numpy(np.argsort(np.argsort(members, kind="stable")))
        return joined.map(lambda tensor: tensor[places])


class _Stream:
    """A member's batches, cut anew."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self._held: Batch | None = None

    def take(self, count: int) -> Batch | None:
        """Return the next examples; None if they are 0."""
        if not count:
            return None
        while self._held is None or len(self._held) < count:
            batch = next(self._batches)
            self._held = batch if self._held is None else self._held.append(batch)
        held = self._held
        self._held = held.map(lambda tensor: tensor[count:])
        return held.map(lambda tensor: tensor[:count])
