"""From a name and arguments, as they stand in a YAML, to a loss."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from losses.base import Loss
from losses.table import LOSSES
from utils.errors import UserError, get_near_names
from utils.registry import Registry

GIVEN = inspect.Parameter.empty  # in place of a default: a configuration must name the argument
_ATTRIBUTES = {"why_not_tokens", "takes_numbers"}


def create_loss(
    name: str,
    args: Mapping[str, Any] | None = None,
    *,
    temperature: float | None = None,
    group_size: int | None = None,
) -> Loss:
    """The loss of that name.

    Args:
      name: a registered name.
      args: the loss's own arguments; they win over the two defaults below.
      temperature: T for losses that have one and whose args do not name it.
      group_size: consecutive examples that losses between examples compare; 0: all.

    Raises:
      UserError: an unknown name, an unknown or missing argument, or a value out of range.
    """
    return create_from(LOSSES, name, args, {"temperature": temperature, "group_size": group_size})


def create_from(
    registry: Registry,
    name: str,
    args: Mapping[str, Any] | None = None,
    usual: Mapping[str, Any] | None = None,
) -> Any:
    """What a registry of losses makes of a name and arguments.

    Args:
      usual: values for arguments that are not given, where the loss has them; none: it decides.

    Raises:
      UserError: as `create_loss`.
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
            near = get_near_names(key, parameters)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UserError(f"distill.losses: {name} has no argument {key!r}; {hint}{takes}")
    for key, parameter in parameters.items():
        if parameter.default is parameter.empty and key not in args:
            raise UserError(f"distill.losses: {name} needs args.{key}; {takes}")
    return factory(**args)


def define(
    kind: type[nn.Module],
    name: str,
    function: Callable[..., Tensor],
    positive: str = "",
    **defaults: Any,
) -> Callable[..., Any]:
    """A factory of the losses `kind(function, **arguments)`.

    Args:
      name: of the loss, for errors.
      positive: arguments, space between them, that must be numbers above 0.
      defaults: all that a configuration can name. `why_not_tokens` and `takes_numbers` are none of
        them but attributes of the loss.
    """
    attributes = {key: defaults.pop(key) for key in _ATTRIBUTES & defaults.keys()}

    def create(**given: Any) -> nn.Module:
        arguments = defaults | given
        check_positive(name, **{key: arguments[key] for key in positive.split()})
        loss = kind(function, **arguments)
        vars(loss).update(attributes)
        return loss

    keywords = [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=value)
        for key, value in defaults.items()
    ]
    create.__signature__ = inspect.Signature(keywords)
    return create


def is_number(value: object, least: float = -math.inf, most: float = math.inf) -> bool:
    """Whether it is a number, which true and false are not, within these bounds."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and least <= value <= most


def is_count(value: object, least: int = 0) -> bool:
    """Whether it is a whole number of at least so many."""
    return isinstance(value, int) and is_number(value, least)


def check_positive(name: str, **values: float) -> None:
    """Refuse arguments that are not numbers above 0."""
    for key, value in values.items():
        if not is_number(value) or value <= 0:
            raise UserError(f"distill.losses: {name}.{key} is {value!r}; give a number above 0")


def check_choice(name: str, key: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a word that is not among the choices."""
    if value not in choices:
        raise UserError(
            f"distill.losses: {name}.{key} is {value!r}; choose one of {', '.join(choices)}"
        )
