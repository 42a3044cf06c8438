"""What tensors of an own model mean beside their names and shapes, and whether weights agree.

The arguments of such a model are a class that a registry has under its name. Most of them are
sizes, which shapes tell, or say how things are computed; what the others give a meaning to is no
start for a model that gives it another. Of models that are not registered, timm's among them,
nothing is compared.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

from utils.errors import UserError
from utils.json_types import JsonMapping
from utils.patterns import matches
from utils.registry import Registry

if TYPE_CHECKING:
    from utils.weights.fitting import Fit


@dataclass(frozen=True)
class Meaning:
    """What an argument says of tensors whose names and shapes do not tell it.

    Attributes:
      value: of the argument.
      tensors: patterns of the names of those tensors.
      sense: what of the value must be alike; none: all of it.
    """

    value: object
    tensors: tuple[str, ...]
    sense: object = None

    def agrees(self, other: Meaning) -> bool:
        """Whether another value means the same."""
        if self.sense is None or other.sense is None:
            return self.value == other.value
        return self.sense == other.sense


class ModelArguments:
    """What the dataclass of a model's arguments says of its tensors.

    Attributes:
      how: arguments that say how things are computed alone; of weights they are not read.
    """

    how: tuple[str, ...] = ()

    @property
    def centred_norms(self) -> tuple[str, ...]:
        """Patterns of the weights of norms that multiply by 1 + weight, not by weight."""
        return ()

    def list_meanings(self) -> dict[str, Meaning]:
        """Arguments that neither names nor shapes of tensors tell."""
        return {}


@dataclass(frozen=True)
class TensorMeanings:
    """The same of one model.

    Attributes:
      model: its name.
      arguments: by name, as far as they are told.
      centred: patterns of the norms that multiply by 1 + weight.
      registry: of the arguments of all models.
    """

    model: str
    arguments: Mapping[str, Meaning]
    centred: tuple[str, ...]
    registry: Registry


@dataclass(frozen=True)
class Disagreement:
    """An argument that gives a model's tensors another meaning than weights have.

    Attributes:
      there, here: its values.
      tensors: patterns of the model's names.
    """

    argument: str
    there: object
    here: object
    tensors: tuple[str, ...]


def find_meanings(registry: Registry, model: object, args: object) -> TensorMeanings | None:
    """What the tensors of a model mean, or None if it is unknown.

    Args:
      registry: of the arguments of models.
      model: its name.
      args: its arguments, of which those that it does not know are left out; no mapping: untold.

    Raises:
      UserError: it does not take their values.
    """
    if not isinstance(model, str) or model not in registry:
        return None
    kind, told = registry.get(model), isinstance(args, Mapping)
    known = {one.name for one in fields(kind)} - set(kind.how)
    try:
        own = kind(**{name: args[name] for name in known & args.keys()} if told else {})
    except (TypeError, ValueError) as error:
        raise UserError(f"tells arguments that {model} does not take: {error}") from error
    meanings = own.list_meanings() if told else {}
    return TensorMeanings(model, meanings, own.centred_norms, registry)


def read_meanings(
    own: TensorMeanings, facts: JsonMapping, key: str, path: str
) -> TensorMeanings | None:
    """What weights tell of their tensors by their model's name and arguments.

    Args:
      own: of the model that is to have them.

    Raises:
      UserError: the model does not take its arguments.
    """
    try:
        return find_meanings(own.registry, facts.get("model"), facts.get("args"))
    except UserError as error:
        raise UserError(f"{key} ({path!r}) {error}") from error


def find_disagreements(
    own: TensorMeanings, theirs: TensorMeanings, names: Collection[str]
) -> list[Disagreement]:
    """Arguments that both have, and that give tensors of these names another meaning."""
    return [
        Disagreement(argument, theirs.arguments[argument].value, mine.value, mine.tensors)
        for argument, mine in own.arguments.items()
        if argument in theirs.arguments
        and not mine.agrees(theirs.arguments[argument])
        and any(matches(name, mine.tensors) for name in names)
    ]


def describe_disagreements(found: Collection[Disagreement], section: str = "model.args") -> str:
    """Both values of each.

    Args:
      section: of the configuration, that sets them.
    """
    return ", ".join(
        f"{section}.{one.argument} is {one.there!r} there and {one.here!r} here" for one in found
    )


def centre_norms(found: Fit, own: TensorMeanings, theirs: TensorMeanings) -> None:
    """Turn norms that multiply by weight into such as multiply by 1 + weight, or back."""
    turned = []
    for name, source in found.sources.items():
        here, there = matches(name, own.centred), matches(source, theirs.centred)
        if name in found.tensors and here != there:
            tensor = found.tensors[name]
            # Not in half the precision, which has no digits left for what is near 1.
            wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
            found.tensors[name] = wide + (1.0 if there else -1.0)
            turned.append(name)
    if turned:
        words = ("1 + weight", "weight")
        there, here = words if theirs.centred else words[::-1]
        found.notes.append(
            f"{len(turned)} norms are turned from {there}, as {theirs.model} multiplies, to {here}"
        )
