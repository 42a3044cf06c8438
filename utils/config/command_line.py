"""Rewrites the words of a command line into those of the configuration's parser."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Literal, NoReturn, get_args, get_origin

import yaml

from utils.config.explain import get_near_keys
from utils.config.foreign_flags import FOREIGN_FLAGS
from utils.config.keys import get_keys, get_section, iterate_keys
from utils.config.sections import RunConfig
from utils.errors import UserError

# Key -> its short flags, from its field.
ALIASES: dict[str, list[str]] = {
    name: list(key.aliases) for name, key in get_keys().items() if key.aliases
}
# Words for None of an optional key, and for the default of a list or mapping.
_NONE_WORDS = ("none", "null", "~", "")
# Flags that are not keys.
_ONCE = ("config", "preset", "errors")
_SWITCHES = ("print-config",)
_KEY_OF = {alias: key for key, aliases in ALIASES.items() for alias in aliases}


def spell_out(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the flags as the parser reads them, and the lists and mappings that are reset.

    `--weight-decay` is `--weight_decay`, `--model.args.depth=2` is `--model.args={depth: 2}`, a
    bare switch is `=true`, a list or mapping in YAML becomes JSON. UserError if --config or
    --preset is repeated, or a value is not a list or mapping.
    """
    out: list[str] = []
    reset: list[str] = []
    for name, value in _pair(argv):
        if name in _ONCE and any(word.startswith(f"--{name}=") for word in out):
            raise UserError(f"--{name} is given twice; keep one, and set single keys by flags")
        key, inner = _find_key(name)
        if value is None:
            out.append(f"--{name}=true" if _get_type(key) is bool else f"--{name}")
            continue
        kinds = get_kinds(key)
        is_none = value.lower() in _NONE_WORDS and not inner
        if is_none and kinds & {dict, list, tuple}:
            reset.append(key)
            out = [word for word in out if not word.startswith(f"--{key}=")]
        elif is_none and type(None) in kinds:
            out.append(f"--{key}=None")
        elif inner:
            out.append(f"--{key}={json.dumps({inner: yaml.safe_load(value)})}")
        else:
            out.append(f"--{key or name}={_to_json(key or name, kinds, value)}")
    return out, reset


def refuse_unknown_flag(token: str) -> NoReturn:
    """Raise a `UserError` that names the key of another trainer's flag, or the most similar one."""
    if not token.startswith("--"):
        raise UserError(f"command line: {token!r} follows no flag; write --KEY VALUE")
    flag = token.partition("=")[0]
    name = flag.removeprefix("--").replace("-", "_")
    hint = find_foreign_hint(name)
    if not hint:
        hint = get_near_keys(name, [*iterate_keys(), *_ONCE, *_SWITCHES, *_KEY_OF])
        if hint.startswith("did you mean"):
            hint = hint.replace("'", "").replace("mean ", "mean --").replace(" or ", " or --")
    raise UserError(f"unknown flag {flag}; {hint}", code="config.unknown_flag", key=flag)


def find_foreign_hint(flag: str) -> str:
    """Return what to use instead of another trainer's flag; empty if it is not known.

    `training.NAME` of trainers with such a section is a short flag, a flag of another trainer, or
    the only key of that name.
    """
    section, _, name = flag.rpartition(".")
    if section == "training":
        same = [key for key in iterate_keys() if key.rpartition(".")[2] == name]
        key = _KEY_OF.get(name) or (same[0] if len(same) == 1 else "")
        if key or f"train.{name}" in same:
            return f"use --{key or f'train.{name}'}"
    hint = FOREIGN_FLAGS.get(flag if section != "training" else name, "")
    return f"use --{hint}" if is_key(hint) else hint


def is_key(hint: str) -> bool:
    """Return whether a hint begins with a key or a short flag."""
    name = re.split(r"[=,: ]", hint)[0]
    return name in get_keys() or name in _KEY_OF


def get_kinds(key: str) -> set[object]:
    """Return a key's types without arguments: `tuple[int, ...] | None` is tuple and NoneType."""
    annotation = _get_type(key)
    return {get_origin(kind) or kind for kind in (annotation, *get_args(annotation))} - {None}


def _pair(argv: Sequence[str]) -> list[tuple[str, str | None]]:
    """Pair flags with their values; a value without a flag is refused."""
    pairs: list[tuple[str, str | None]] = []
    is_open = False
    for token in argv:
        token = "--help" if token == "-h" else token
        name, equals, value = token.partition("=")
        if token.startswith("--"):
            pairs.append((name.removeprefix("--"), value if equals else None))
            is_open = not equals
        elif is_open:
            pairs[-1] = (pairs[-1][0], token)
            is_open = False
        else:
            refuse_unknown_flag(token)
    return pairs


def _find_key(name: str) -> tuple[str, str]:
    """Return the key of a flag, or "", and the name inside its mapping, or ""."""
    for spelling in (name, name.replace("-", "_")):
        key = "model.name" if spelling == "model" else _KEY_OF.get(spelling, spelling)
        if _get_type(key) is not None or key in _ONCE:
            return key, ""
        outer, _, inner = key.rpartition(".")
        if dict in get_kinds(outer):
            return outer, inner
    return "", ""


def _get_type(key: str) -> object:
    """Return the annotation of `section.key`, or None if it is unknown."""
    section, _, name = key.partition(".")
    known = section in RunConfig.model_fields
    field = get_section(section).model_fields.get(name) if known else None
    return field.annotation if field else None


def _to_json(key: str, kinds: set[object], value: str) -> str:
    """Convert a list or mapping from YAML, and a mapping from name=value, to JSON."""
    if not kinds & {dict, list, tuple}:
        return value
    try:
        if value.startswith(("{", "[")):
            return json.dumps(yaml.safe_load(value))
        if dict in kinds and "=" in value:
            name, _, inner = value.partition("=")
            return json.dumps({name: yaml.safe_load(inner)})
    except (yaml.YAMLError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"--{key} ({value!r}) is not a list or mapping: {reason}; write [a, b] or "
            "{name: value}"
        ) from error
    if dict in kinds and Literal not in kinds:
        raise UserError(f"--{key} ({value!r}) is not a mapping; write '{{name: value}}'")
    return value
