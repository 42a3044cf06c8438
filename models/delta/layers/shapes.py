"""What the arguments of all models here have in common: their checks, and how rules are computed.

`model.args` gives a shape's fields by name.
"""

from __future__ import annotations

import math
from dataclasses import Field, dataclass, fields

from models.delta.rules.layout import CoreOptions
from utils.errors import UserError


@dataclass(frozen=True)
class ModelShape:
    """Arguments that are whole numbers, switches or numbers above 1, as their defaults are."""

    # What knows no places, and rotary angles, reach as far as one likes.
    positions = "rope"

    def __post_init__(self) -> None:
        for one in fields(self):
            _check(one, getattr(self, one.name))


@dataclass(frozen=True)
class ChunkedShape(ModelShape):
    """Arguments that say how a rule is computed (docs/delta.md).

    Attributes:
      chunk: tokens that are computed at a time.
      solver: of the triangular systems of chunks.
      loop: over chunks.
      products: of matrices, in float32 or by parts of bfloat16.
      pad: windows that fill no whole chunks are padded; else they are refused.
      backend: own, or fla, flash_qla or flashinfer, whose kernels run on NVIDIA GPUs.
    """

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
        """How its rule is computed.

        Raises:
          UserError: it cannot be computed so.
        """
        try:
            return CoreOptions(
                chunk=self.chunk, solver=self.solver, loop=self.loop,
                products=self.products, pad=self.pad, backend=self.backend,
            )  # fmt: skip
        except UserError as error:
            raise UserError(f"model.args.{error}") from None


def require_divisor(shape: object, part: str, whole: str) -> None:
    """Refuse arguments of which one does not divide the other.

    Raises:
      UserError: names both.
    """
    of_part, of_whole = getattr(shape, part), getattr(shape, whole)
    if of_whole % of_part:
        raise UserError(
            f"model.args.{part} ({of_part}) does not divide model.args.{whole} ({of_whole}); "
            "choose a divisor"
        )


def count_delta_flops(heads: int, key: int, value: int, chunk: int) -> float:
    """Of a delta rule, a token: 6 K V of the state and C (6 K + 4 V) of the chunk, a head."""
    return float(heads * (6 * key * value + chunk * (6 * key + 4 * value)))


def _check(one: Field, value: object) -> None:
    """A number's metadata may name the `least` that it may be; else it is above 1."""
    name, kind, least = one.name, type(one.default), one.metadata.get("least")
    if kind is int and (type(value) is not int or value < 1):
        raise UserError(f"model.args.{name} ({value!r}) must be a whole number, 1 or more")
    if kind is bool and type(value) is not bool:
        raise UserError(f"model.args.{name} ({value!r}) must be true or false")
    if kind is not float:
        return
    is_number = type(value) in (int, float) and value < math.inf
    if not is_number or not (value > 1 if least is None else value >= least):
        rule = "above 1" if least is None else f"of {least:g} or more"
        raise UserError(f"model.args.{name} ({value!r}) must be a number {rule}")
