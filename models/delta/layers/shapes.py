"""Common arguments of the models here: their checks, and how rules are computed.

`model.args` sets the fields of a shape by name.
"""

from __future__ import annotations

import math
from dataclasses import Field, dataclass, fields

from models.delta.rules.layout import CoreOptions
from utils.errors import UserError
from utils.json_types import JsonValue


@dataclass(frozen=True)
class ModelShape:
    """Arguments that are whole numbers, switches or numbers above 1, as their defaults are."""

    # Models without positions, and rotary angles, have no longest sequence.
    positions = "rope"

    def __post_init__(self) -> None:
        for argument in fields(self):
            _check(argument, getattr(self, argument.name))


@dataclass(frozen=True)
class ChunkedShape(ModelShape):
    """Arguments that say how a rule is computed: fields of `CoreOptions` (docs/delta.md)."""

    chunk: int = 64
    solver: str = "auto"
    loop: str = "auto"
    products: str = "auto"
    pad: bool = True
    backend: str = "own"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.get_options()

    def get_options(self) -> CoreOptions:
        """Return the options of its rule, or raise UserError naming the argument that is wrong."""
        try:
            return CoreOptions(**{x.name: getattr(self, x.name) for x in fields(ChunkedShape)})
        except UserError as error:
            raise UserError(f"model.args.{error}") from None


def require_divisor(shape: ModelShape, part: str, whole: str) -> None:
    """Refuse a part that does not divide the whole."""
    of_part, of_whole = getattr(shape, part), getattr(shape, whole)
    if of_whole % of_part:
        raise UserError(
            f"model.args.{part} ({of_part}) does not divide model.args.{whole} ({of_whole}); "
            "choose a divisor"
        )


def count_delta_flops(heads: int, key: int, value: int, chunk: int) -> float:
    """Count FLOPs of a token: 6 K V of a head's state, and C (6 K + 4 V) of its chunk."""
    return float(heads * (6 * key * value + chunk * (6 * key + 4 * value)))


def _check(argument: Field[JsonValue], value: JsonValue) -> None:
    """Check a value by its default's type; floats are above 1, or as the metadata says."""
    name, wanted = argument.name, type(argument.default)
    least = argument.metadata.get("least")
    if wanted is int and (type(value) is not int or value < 1):
        raise UserError(f"model.args.{name} ({value!r}) must be a whole number, 1 or more")
    if wanted is bool and type(value) is not bool:
        raise UserError(f"model.args.{name} ({value!r}) must be true or false")
    if wanted is not float:
        return
    number = value if isinstance(value, int | float) and type(value) is not bool else math.inf
    if not number < math.inf or not (number > 1 if least is None else number >= least):
        rule = "above 1" if least is None else f"of {least:g} or more"
        raise UserError(f"model.args.{name} ({value!r}) must be a number {rule}")
