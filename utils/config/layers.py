"""Layers of values: files that extend each other, a preset, and the command line.

Later layers win: extended files, the file itself, the preset, the flags. A mapping's entries are
merged into those below, a list replaces the one below, and null removes either.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from utils.config.command_line import get_kinds
from utils.config.programs import refuse_program
from utils.config.sections import RunConfig
from utils.config.yaml_file import read_yaml
from utils.errors import UserError, get_hint
from utils.json_types import JsonObject, JsonValue
from utils.storage.installation import ROOT, find_bundled

EXTENDS = "extends"
DEFAULT = "default"
COMMAND_LINE = "command line"
_COLUMN = 44  # of the origins behind the values
PRESETS = ROOT / "configs" / "presets"


@dataclass(frozen=True)
class Layer:
    """The values of one origin, section by section."""

    origin: str  # path of a file, `preset NAME` or `command line`
    values: JsonObject


def read_layers(config: str | None, preset: str | None) -> list[Layer]:
    """Read the layers of `--config` and `--preset`, the strongest last; UserError if wrong."""
    layers = [] if config is None else _read_file(find_bundled(config), "--config", ())
    if preset is None:
        return layers
    if preset not in list_presets():
        raise UserError(f"unknown --preset {preset!r}; {get_hint(preset, list_presets())}")
    *below, own = _read_file(str(PRESETS / f"{preset}.yaml"), "--preset", ())
    return [*layers, *below, Layer(f"preset {preset}", own.values)]


def merge_layers(layers: Iterable[Layer]) -> JsonObject:
    merged: JsonObject = {}
    for layer in layers:
        for section, values in layer.values.items():
            if isinstance(values, dict):
                below = merged.get(section)
                below = below if isinstance(below, dict) else {}
                merged[section] = _merge_section(below, values, section)
            else:
                merged[section] = values
    return merged


def find_origin(layers: Sequence[Layer], path: Sequence[str | int]) -> str:
    """Return the strongest layer with a value at a path such as ("model", "args", "depth")."""
    for layer in reversed(layers):
        if _holds(layer.values, path):
            return layer.origin
    return DEFAULT


def format_origins(config: RunConfig, layers: Sequence[Layer]) -> str:
    """Format a configuration as YAML that `--config` reads back; each line ends with its origin.

    Entries of a mapping have a line each, because they may come from several layers.
    """
    return "".join(f"{line}\n" for line in _format(config.model_dump(mode="json"), layers, ()))


def locate_imports(values: JsonObject, folder: Path) -> None:
    """Make run.import_dir of these values absolute, from a folder; that folder where it is empty.

    A run and its resolved configuration find its modules from any directory.
    """
    run = values.get("run")
    if not isinstance(run, dict) or not (run.get("imports") or run.get("import_dir")):
        return
    named = run.get("import_dir") or ""
    if isinstance(named, str):
        run["import_dir"] = os.path.normpath(folder.absolute() / Path(named).expanduser())


def list_presets() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def _read_file(path: str, reason: str, above: tuple[str, ...]) -> list[Layer]:
    """Read the layers of the files that a file extends, and its own.

    `reason` begins each error; `above` are files that extend each other down to this one.
    """
    known = [os.path.realpath(file) for file in above]
    if os.path.realpath(path) in known:
        circle = " -> ".join([*above[known.index(os.path.realpath(path)) :], path])
        raise UserError(f"{EXTENDS} goes in a circle: {circle}; remove one of them")
    values = read_yaml(path, reason)
    refuse_program(values, path, reason)
    locate_imports(values, Path(path).parent)
    layers: list[Layer] = []
    named = values.pop(EXTENDS, [])
    bases = [named] if isinstance(named, str) else named
    if not isinstance(bases, list) or not all(name and isinstance(name, str) for name in bases):
        raise UserError(
            f"{reason} {path}: {EXTENDS} ({named!r}) must name files; write {EXTENDS}: base.yaml "
            f"or {EXTENDS}: [a.yaml, b.yaml]"
        )
    for name in bases:
        base = os.path.normpath(Path(path).parent / name)
        if not Path(base).exists() and (ROOT / name).exists():
            base = str(ROOT / name)
        layers += _read_file(base, f"{EXTENDS} in {path}:", (*above, path))
    return [*layers, Layer(path, values)]


def _merge_section(below: JsonObject, values: JsonObject, section: str) -> JsonObject:
    merged = dict(below)
    for key, value in values.items():
        if value is None and get_kinds(f"{section}.{key}") & {dict, list, tuple}:
            merged.pop(key, None)
        else:
            merged[key] = _merge(merged.get(key), value)
    return merged


def _merge(below: JsonValue, value: JsonValue) -> JsonValue:
    if not (isinstance(below, dict) and isinstance(value, dict)):
        return value
    return {**below, **{name: _merge(below.get(name), inner) for name, inner in value.items()}}


def _holds(values: JsonValue, path: Sequence[str | int]) -> bool:
    for part in path:
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True


def _format(values: JsonObject, layers: Sequence[Layer], path: tuple[str, ...]) -> Iterator[str]:
    for name, value in values.items():
        here = (*path, name)
        head = "  " * len(path) + f"{_write(name)}:"
        if isinstance(value, dict) and value:
            yield head
            yield from _format(value, layers, here)
        else:
            yield f"{head} {_write(value)}".ljust(_COLUMN) + f"  # {find_origin(layers, here)}"


def _write(value: JsonValue) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=float("inf"))
    return text.removesuffix("\n").removesuffix("...").removesuffix("\n")
