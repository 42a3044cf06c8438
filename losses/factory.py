"""Creates a loss from a name and arguments, as a YAML has them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, TypeGuard

from torch import Tensor

from losses.base import Loss
from losses.table import LOSSES
from utils.errors import UserError, get_near_names
from utils.json_types import JsonMapping, JsonValue
from utils.registry import Registry
from utils.torch_types import ModuleT

GIVEN = inspect.Parameter.empty  # in place of a default: a configuration must name the argument
_ATTRIBUTES = {"why_not_tokens", "takes_numbers"}


def create_loss(
    name: str,
    args: JsonMapping | None = None,
    *,
    temperature: float | None = None,
    group_size: int | None = None,
) -> Loss:
    """Create the loss of that name.

    Args:
      args: the loss's own arguments; they take precedence over the two defaults below.
      temperature: T for losses that have one and whose args do not set it.
      group_size: consecutive examples that losses between examples compare; 0: all.

    Raises:
      UserError: an unknown name, an unknown or missing argument, or a value out of range.
    """
    return create_from(LOSSES, name, args, {"temperature": temperature, "group_size": group_size})


def create_from(
    registry: Registry[Callable[..., ModuleT]],
    name: str,
    args: JsonMapping | None = None,
    usual: JsonMapping | None = None,
) -> ModuleT:
    """Create an entry of a registry of losses, with errors as in `create_loss`.

    `usual` has values for what `args` does not set; None, or unknown to the loss, are ignored.
    """
    factory = registry.get(name)
    parameters = inspect.signature(factory).parameters
    args = dict(args or {})
    for key, value in (usual or {}).items():
        if value is not None and key in parameters:
            args.setdefault(key, value)
    takes = f"it takes {', '.join(parameters)}" if parameters else "it takes none"
    for key in args:
        if key not in parameters:
            hint = get_near_names(key, parameters)[:1]
            hint = f"did you mean {hint[0]!r}? " if hint else ""
            raise UserError(f"distill.losses: {name} has no argument {key!r}; {hint}{takes}")
    for key, parameter in parameters.items():
        if parameter.default is parameter.empty and key not in args:
            raise UserError(f"distill.losses: {name} needs args.{key}; {takes}")
    return factory(**args)


def define(
    kind: Callable[..., ModuleT],
    name: str,
    function: Callable[..., Tensor],
    positive: str = "",
    **defaults: Any,
) -> Callable[..., ModuleT]:
    """Create a factory of the losses `kind(function, **arguments)`; errors name the loss.

    The arguments in `positive`, separated by spaces, must be numbers above 0; `defaults` are all
    that a configuration can name, besides the attributes `why_not_tokens` and `takes_numbers`.
    """
    attributes = {key: defaults.pop(key) for key in _ATTRIBUTES & defaults.keys()}

    def create(**given: JsonValue) -> ModuleT:
        arguments = defaults | given
        check_positive(name, **{key: arguments[key] for key in positive.split()})
        loss = kind(function, **arguments)
        vars(loss).update(attributes)
        return loss

    keywords = [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=value)
        for key, value in defaults.items()
    ]
    vars(create)["__signature__"] = inspect.Signature(keywords)
    create.__doc__ = function.__doc__
    return create


def weigh_parts(parts: Callable[..., tuple[Tensor, Tensor]], *keys: str) -> Callable[..., Tensor]:
    """Create a function that adds two parts, each times the keyword argument named in `keys`."""

    def compute(*inputs: Tensor, **arguments: float) -> Tensor:
        factors = [arguments.pop(key) for key in keys]
        first, second = parts(*inputs, **arguments)
        return factors[0] * first + factors[1] * second

    return compute


def is_number(value: object, least: float = -math.inf, most: float = math.inf) -> TypeGuard[float]:
    """Return whether it is a number, which true and false are not, within these bounds."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and least <= value <= most


def is_count(value: object, least: int = 0) -> bool:
    """Return whether it is a whole number of at least `least`."""
    return isinstance(value, int) and is_number(value, least)


def check_positive(name: str, **values: JsonValue) -> None:
    """Raise a UserError for arguments that are not numbers above 0."""
    for key, value in values.items():
        if not is_number(value) or value <= 0:
            raise UserError(f"distill.losses: {name}.{key} is {value!r}; give a number above 0")


def check_steps(name: str, purpose: str, **values: int) -> None:
    """Raise a UserError for arguments that are not whole numbers of steps; `purpose` ends it."""
    for key, value in values.items():
        if not is_count(value):
            raise UserError(
                f"distill.losses: {name}.{key} is {value!r}; give a whole number of 0 or more, "
                f"the steps that {purpose}"
            )


def check_choice(name: str, key: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise a UserError for a word that is not among the choices."""
    if value not in choices:
        raise UserError(
            f"distill.losses: {name}.{key} is {value!r}; choose one of {', '.join(choices)}"
        )
