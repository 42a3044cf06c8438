"""Turns what people write on a command line into what the configuration's parser wants."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NoReturn, get_args, get_origin

import yaml

from utils.config.aliases import ALIASES, OF_TIMM
from utils.config.explain import get_near_keys
from utils.config.keys import iterate_keys
from utils.config.sections import RunConfig
from utils.errors import UserError

# What means none for an optional key, and for a list or mapping its default.
_NONE_WORDS = ("none", "null", "~", "")
# The parser's own word for it.
_NONE = "None"
# What is given beside keys.
_ONCE = ("config", "preset")
_SWITCHES = ("print-config",)
_KEY_OF = {alias: key for key, aliases in ALIASES.items() for alias in aliases}


def spell_out(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Flags as the parser wants them, and the lists and mappings that are set to none.

    `--weight-decay` is `--weight_decay`, `--model.args.depth=2` is `--model.args={depth: 2}`, a
    bare switch is `=true`, a list or mapping in YAML becomes JSON.

    Raises:
      UserError: --config or --preset twice, or what is no list or mapping.
    """
    out: list[str] = []
    reset: list[str] = []
    for name, value in _pair(argv):
        if name in _ONCE and any(word.startswith(f"--{name}=") for word in out):
            raise UserError(f"--{name} is given twice; keep one, and give single keys as flags")
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
            out.append(f"--{key}={_NONE}")
        elif inner:
            out.append(f"--{key}={json.dumps({inner: yaml.safe_load(value)})}")
        else:
            out.append(f"--{key or name}={_to_json(key or name, kinds, value)}")
    return out, reset


def refuse_unknown_flag(token: str) -> NoReturn:
    """Say which flag was meant.

    Raises:
      UserError: always.
    """
    name = token.partition("=")[0].removeprefix("--")
    if not token.startswith("--"):
        raise UserError(f"command line: {token!r} belongs to no flag; write --KEY VALUE")
    if name.replace("-", "_") in OF_TIMM:
        raise UserError(f"unknown flag --{name}; here it is --{OF_TIMM[name.replace('-', '_')]}")
    hint = get_near_keys(name.replace("-", "_"), [*iterate_keys(), *_ONCE, *_SWITCHES, *_KEY_OF])
    if hint.startswith("did you mean"):
        hint = hint.replace("'", "").replace("mean ", "mean --").replace(" or ", " or --")
    raise UserError(f"unknown flag --{name}; {hint}")


def get_kinds(key: str) -> set[object]:
    """Its types without their arguments: `tuple[int, ...] | None` is tuple and NoneType."""
    kind = _get_type(key)
    return {get_origin(one) or one for one in (kind, *get_args(kind))} - {None}


def _pair(argv: Sequence[str]) -> list[tuple[str, str | None]]:
    """Flag names with their values; a value that belongs to no flag is refused."""
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
    """The key that a flag stands for, and a name inside its mapping; empty for none."""
    for spelling in (name, name.replace("-", "_")):
        key = "model.name" if spelling == "model" else _KEY_OF.get(spelling, spelling)
        if _get_type(key) is not None or key in _ONCE:
            return key, ""
        outer, _, inner = key.rpartition(".")
        if dict in get_kinds(outer):
            return outer, inner
    return "", ""


def _get_type(key: str) -> object:
    """The annotation of `section.key`; none for an unknown one."""
    section, _, name = key.partition(".")
    owner = RunConfig.model_fields.get(section)
    field = owner.annotation.model_fields.get(name) if owner else None
    return field.annotation if field else None


def _to_json(key: str, kinds: set[object], value: str) -> str:
    """A list or mapping may be written as in the YAML file, a mapping also as name=value."""
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
            f"--{key} ({value!r}) is no list or mapping: {reason}; write [a, b] or {{name: value}}"
        ) from error
    if dict in kinds:
        raise UserError(f"--{key} ({value!r}) is no mapping; write '{{name: value}}'")
    return value
