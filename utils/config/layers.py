"""Where values come from: files that extend each other, a preset, and the command line on top.

Later layers win: what a file extends, the file itself, the preset, the flags. A mapping's entries
join those below it, a list takes the place of the one below, and null drops either.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from utils.config.command_line import get_kinds
from utils.config.yaml_file import read_yaml
from utils.errors import UserError, get_hint
from utils.json_types import JsonObject, JsonValue

EXTENDS = "extends"
DEFAULT = "default"
COMMAND_LINE = "command line"
PRESETS = Path(__file__).resolve().parents[2] / "configs" / "presets"


@dataclass(frozen=True)
class Layer:
    """What one origin says, section by section.

    Args:
      origin: a file as it was reached, `preset NAME` or `command line`.
    """

    origin: str
    values: JsonObject


def read_layers(config: str | None, preset: str | None) -> list[Layer]:
    """The layers of `--config` and `--preset`, the strongest last.

    Raises:
      UserError: a file or preset that is not there or no YAML, or files that extend in a circle.
    """
    layers = [] if config is None else _read_file(config, "--config", ())
    return layers if preset is None else [*layers, *_read_preset(preset)]


def merge_layers(layers: Iterable[Layer]) -> JsonObject:
    """The values of all layers together."""
    merged: JsonObject = {}
    for layer in layers:
        for section, values in layer.values.items():
            below = merged.get(section)
            if isinstance(values, dict):
                merged[section] = _lay(below if isinstance(below, dict) else {}, values, section)
            else:
                merged[section] = values
    return merged


def find_origin(layers: Sequence[Layer], place: Sequence[str | int]) -> str:
    """The strongest layer that says something at a place such as ("model", "args", "depth")."""
    for layer in reversed(layers):
        if _holds(layer.values, place):
            return layer.origin
    return DEFAULT


def list_presets() -> list[str]:
    """Names that `--preset` takes."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def _read_preset(name: str) -> list[Layer]:
    if name not in list_presets():
        hint = get_hint(name, list_presets())
        raise UserError(f"--preset ({name!r}) is no file of configs/presets; {hint}")
    *below, own = _read_file(str(PRESETS / f"{name}.yaml"), "--preset", ())
    return [*below, Layer(f"preset {name}", own.values)]


def _read_file(path: str, reason: str, above: tuple[str, ...]) -> list[Layer]:
    """A file's layer behind those of the files that it extends.

    Args:
      reason: what asked for the file: the beginning of each refusal.
      above: files that extend each other down to this one.
    """
    known = [os.path.realpath(one) for one in above]
    if os.path.realpath(path) in known:
        circle = " -> ".join([*above[known.index(os.path.realpath(path)) :], path])
        raise UserError(f"{EXTENDS} goes in a circle: {circle}; take one of them out")
    values = read_yaml(path, reason)
    layers: list[Layer] = []
    for name in _get_bases(values.pop(EXTENDS, []), path, reason):
        base = os.path.normpath(Path(path).parent / name)
        layers += _read_file(base, f"{EXTENDS} in {path}:", (*above, path))
    return [*layers, Layer(path, values)]


def _get_bases(named: JsonValue, path: str, reason: str) -> list[str]:
    bases = [named] if isinstance(named, str) else named
    if not isinstance(bases, list) or not all(one and isinstance(one, str) for one in bases):
        raise UserError(
            f"{reason} {path}: {EXTENDS} ({named!r}) names no files; write {EXTENDS}: base.yaml or "
            f"{EXTENDS}: [a.yaml, b.yaml]"
        )
    return bases


def _lay(below: JsonObject, values: JsonObject, section: str) -> JsonObject:
    laid = dict(below)
    for key, value in values.items():
        if value is None and get_kinds(f"{section}.{key}") & {dict, list, tuple}:
            laid.pop(key, None)
        else:
            laid[key] = _join(laid.get(key), value)
    return laid


def _join(below: JsonValue, value: JsonValue) -> JsonValue:
    if not (isinstance(below, dict) and isinstance(value, dict)):
        return value
    return {**below, **{name: _join(below.get(name), inner) for name, inner in value.items()}}


def _holds(values: JsonValue, place: Sequence[str | int]) -> bool:
    for part in place:
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True
