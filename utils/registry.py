"""Maps names to factories. Finished runs live elsewhere, in the run store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from utils.errors import UserError, get_hint


class Registry:
    """Named factories of one kind.

    >>> LOSSES = Registry("loss")
    >>> @LOSSES.register("kd")
    ... class SoftKD: ...
    >>> LOSSES.get("kd") is SoftKD
    True
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._factories: dict[str, Callable[..., Any]] = {}

    def register(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator that files a factory under `name`; a name is given once."""

        def file_factory(factory: Callable[..., Any]) -> Callable[..., Any]:
            if name in self._factories:
                raise RuntimeError(f"{self.kind} {name!r} is registered twice")
            self._factories[name] = factory
            return factory

        return file_factory

    def get(self, name: str) -> Callable[..., Any]:
        """The factory of that name; a UserError with near names if there is none."""
        if name not in self._factories:
            raise UserError(f"unknown {self.kind} {name!r}; {get_hint(name, self._factories)}")
        return self._factories[name]

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._factories)

    def __contains__(self, name: str) -> bool:
        return name in self._factories

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())
