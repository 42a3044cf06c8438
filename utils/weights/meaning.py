"""Compares the meaning of tensors of own models, beyond names and shapes.

The arguments of such a model are a class in a registry. Most are sizes, which shapes show, or
choose how to compute; the others change the meaning of tensors, and weights must agree in them.
Models that are not registered, timm's among them, are not compared.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Self

import torch

from utils.errors import UserError
from utils.json_types import JsonMapping, JsonValue
from utils.patterns import matches
from utils.registry import Registry

if TYPE_CHECKING:
    from utils.weights.fitting import Fit


@dataclass(frozen=True)
class Meaning:
    """An argument that changes the meaning of tensors but not their names and shapes."""

    value: JsonValue  # of the argument
    tensors: tuple[str, ...]  # patterns of the names of those tensors
    sense: JsonValue = None  # the part of the value that must agree; None: all of it

    def agrees(self, other: Meaning) -> bool:
        """Return whether another value means the same."""
        if self.sense is None or other.sense is None:
            return self.value == other.value
        return self.sense == other.sense


@dataclass(frozen=True)
class ModelArguments:
    """Base of models' arguments; `how`: those that only choose how to compute, so not compared."""

    how: ClassVar[tuple[str, ...]] = ()

    @property
    def centred_norms(self) -> tuple[str, ...]:
        """Name patterns of norms that multiply by 1 + weight, not by weight."""
        return ()

    @classmethod
    def parse(cls, given: JsonMapping) -> Self:
        """Return the arguments of `model.args`; UserError or TypeError for wrong ones."""
        return cls(**given)

    def list_meanings(self) -> dict[str, Meaning]:
        """Return the arguments that neither names nor shapes of tensors show."""
        return {}


ArgumentTable = Registry[type[ModelArguments]]


@dataclass(frozen=True)
class TensorMeanings:
    """The meanings of one model's tensors."""

    model: str  # its name
    arguments: Mapping[str, Meaning]  # by name, if they are known
    centred: tuple[str, ...]  # patterns of the norms that multiply by 1 + weight
    registry: ArgumentTable  # of the arguments of all models


@dataclass(frozen=True)
class Disagreement:
    """An argument in which weights (`there`) and a model (`here`) differ."""

    argument: str
    there: JsonValue
    here: JsonValue
    tensors: tuple[str, ...]  # name patterns of the model's tensors that it concerns


def find_meanings(
    registry: ArgumentTable, model: JsonValue, args: JsonValue
) -> TensorMeanings | None:
    """Return the meanings of a registered model's tensors, or None; UserError for bad values."""
    if not isinstance(model, str) or model not in registry:
        return None
    kind, values = registry.get(model), args if isinstance(args, Mapping) else {}
    known = {field.name for field in fields(kind)} - set(kind.how)
    try:
        own = kind.parse({name: values[name] for name in known & values.keys()})
    except (TypeError, ValueError) as error:
        raise UserError(f"has arguments that {model} does not take: {error}") from error
    meanings = own.list_meanings() if isinstance(args, Mapping) else {}
    return TensorMeanings(model, meanings, own.centred_norms, registry)


def read_meanings(
    own: TensorMeanings, facts: JsonMapping, key: str, path: str
) -> TensorMeanings | None:
    """Return the meanings of weights by their model's name and arguments; None if unknown."""
    try:
        return find_meanings(own.registry, facts.get("model"), facts.get("args"))
    except UserError as error:
        raise UserError(f"{key} ({path!r}) {error}") from error


def find_disagreements(
    own: TensorMeanings, theirs: TensorMeanings, names: Collection[str]
) -> list[Disagreement]:
    """Return shared arguments that give tensors of these names different meanings."""
    return [
        Disagreement(argument, theirs.arguments[argument].value, mine.value, mine.tensors)
        for argument, mine in own.arguments.items()
        if argument in theirs.arguments
        and not mine.agrees(theirs.arguments[argument])
        and any(matches(name, mine.tensors) for name in names)
    ]


def describe_disagreements(differing: Collection[Disagreement], section: str = "model.args") -> str:
    """Format both values of each argument, below its section of the configuration."""
    return ", ".join(
        f"{section}.{item.argument} is {item.there!r} there and {item.here!r} here"
        for item in differing
    )


def centre_norms(fitted: Fit, own: TensorMeanings, theirs: TensorMeanings) -> None:
    """Convert norms between multiplication by weight and by 1 + weight."""
    converted = []
    tensors = fitted.get_tensors()
    for name, source in fitted.sources.items():
        here, there = matches(name, own.centred), matches(source, theirs.centred)
        if name in tensors and here != there:
            tensor = tensors[name]
            # Half precision has too few digits near 1.
            wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
            fitted.tensors[name] = wide + (1.0 if there else -1.0)
            converted.append(name)
    if converted:
        words = ("1 + weight", "weight")
        there, here = words if theirs.centred else words[::-1]
        fitted.notes.append(
            f"{len(converted)} norms are converted from {there}, as in {theirs.model}, to {here}"
        )
