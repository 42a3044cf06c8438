"""Maps names to factories, which are imported on their first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from utils.errors import UserError, get_hint

# What a registry holds: a class, or a function that creates one thing.
T = TypeVar("T", bound=Callable[..., Any])


class Registry(Generic[T]):
    """Named factories of one kind.

    >>> LOSSES = Registry("loss", {"kd": "losses.logits.kd:SoftKD"})
    >>> LOSSES.get("kd").__name__
    'SoftKD'

    `kind` is for error messages; `table` maps a name to the "module:object" that `get` imports.
    """

    def __init__(self, kind: str, table: Mapping[str, str] | None = None) -> None:
        self.kind = kind
        self._factories: dict[str, T | str] = dict(table or {})

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers a factory under an unused name."""

        def file_factory(factory: T) -> T:
            if name in self._factories:
                raise RuntimeError(f"{self.kind} {name!r} is registered twice")
            self._factories[name] = factory
            return factory

        return file_factory

    def get(self, name: str) -> T:
        """Return the factory of a name; a UserError with similar names if it is unknown."""
        if name not in self._factories:
            raise UserError(f"unknown {self.kind} {name!r}; {get_hint(name, self._factories)}")
        factory = self._factories[name]
        if isinstance(factory, str):
            loaded: T = load_object(factory)
            self._factories[name] = loaded
            return loaded
        return factory

    def names(self) -> list[str]:
        return sorted(self._factories)

    def __contains__(self, name: str) -> bool:
        return name in self._factories

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())


def load_object(path: str) -> Any:
    """Import a module and return one of its objects: `"module:object"`."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
