"""The resolved configuration as YAML, with the origin of each key beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import yaml

from utils.config.layers import Layer, find_origin
from utils.config.sections import RunConfig
from utils.json_types import JsonObject, JsonValue

_COLUMN = 44


def show_origins(config: RunConfig, layers: Sequence[Layer]) -> str:
    """YAML that `--config` reads back to an equal configuration; each line says where it is from.

    A mapping's entries have a line each: they may come from several layers.
    """
    return "".join(f"{line}\n" for line in _show(config.model_dump(mode="json"), layers, ()))


def _show(values: JsonObject, layers: Sequence[Layer], place: tuple[str, ...]) -> Iterator[str]:
    for name, value in values.items():
        here = (*place, name)
        head = "  " * len(place) + f"{_write(name)}:"
        if isinstance(value, dict) and value:
            yield head
            yield from _show(value, layers, here)
        else:
            yield f"{head} {_write(value)}".ljust(_COLUMN) + f"  # {find_origin(layers, here)}"


def _write(value: JsonValue) -> str:
    """A value in one line of YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=float("inf"))
    return text.removesuffix("\n").removesuffix("...").removesuffix("\n")
