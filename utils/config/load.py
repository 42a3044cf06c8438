"""`load_config`: a YAML file and flags become one frozen, validated `RunConfig`."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from copy import copy, deepcopy
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import yaml
from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsConfigDict, SettingsError

from utils.config.checks import check_config
from utils.config.command_line import ALIASES, refuse_unknown_flag, spell_out
from utils.config.explain import describe_key, explain
from utils.config.keys import get_keys
from utils.config.layers import (
    COMMAND_LINE,
    DEFAULT,
    Layer,
    find_origin,
    format_origins,
    list_presets,
    merge_layers,
    read_layers,
)
from utils.config.sections import RunConfig
from utils.errors import UserError
from utils.json_types import JsonMapping, JsonObject
from utils.own_code import NO_CODE, OwnCode, import_modules
from utils.programs import ERROR_FORMS, ERRORS_FLAG
from utils.storage.installation import name_commands

_EPILOG = """\
Set keys in the YAML file of --config or on the command line (--a.b=v or --a.b v). Precedence:
defaults < files that the file extends < the file < --preset < the command line; --print-config
prints all values with their origin. --batch_size is the global batch of one optimizer step,
--update_freq splits it into micro-batches; --kd, --kd_alpha and --kd_temperature define one
distillation term. none, null, ~ or nothing (--a.b=) sets an optional key to none, and a list or
mapping to its default. Entries of a mapping are merged into those of the file;
--model.args.depth=2 sets one entry.
Brackets hold the rules of a key. On --resume another value is refused, except with
resume: free, resume: warns (allowed, but bits may differ) or resume: between epochs.
"""


class _Settings(RunConfig, BaseSettings):
    """`RunConfig` as pydantic-settings reads it from the command line."""

    # pyrefly: ignore[bad-override]  # the bases' dictionaries of one name differ in type
    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        cli_avoid_json=True,
        cli_use_class_docs_for_groups=True,
        cli_shortcuts=ALIASES,
    )


class _ConfigParser(argparse.ArgumentParser):
    """Reports errors in one line."""

    def format_help(self) -> str:
        return name_commands(super().format_help())

    def error(self, message: str) -> NoReturn:
        text = f"command line: {message}; see python main.py --help"
        raise UserError(text, code="usage.invalid")


def load_config(argv: Sequence[str], *, imports: bool = True) -> RunConfig:
    """Return the configuration of a command line; a UserError if it is wrong.

    Imports the modules of run.imports first, unless `imports` is false: what they register is not
    looked at then. `--help` and `--print-config` print and exit.
    """
    if not argv:
        raise UserError(
            "nothing to run; use --config configs/NAME.yaml, --help lists all keys, and README.md "
            "begins with two commands that work without data"
        )
    words, reset = spell_out(argv)
    namespace, rest = create_parser().parse_known_args(words)
    if rest:
        refuse_unknown_flag(rest[0])
    above = []
    for key in reset:
        section, _, name = key.partition(".")
        above.append(Layer(COMMAND_LINE, {section: {name: None}}))
    above.append(Layer(COMMAND_LINE, _read_flags(namespace)))
    config, layers = _combine(namespace.config, namespace.preset, above, imports=imports)
    if namespace.print_config:
        sys.stdout.write(format_origins(config, layers))
        raise SystemExit(0)
    return config


def combine_config(config: str, overrides: JsonMapping, origin: str) -> RunConfig:
    """Return the configuration of a YAML file with overrides (dotted key -> value) of an origin.

    The modules of run.imports are not imported: the program that runs it does so.
    """
    values: JsonObject = {}
    for key, value in overrides.items():
        *above, last = key.split(".")
        if not above or not all((*above, last)):
            raise UserError(f"{origin}: {key!r} is not a key; write section.key, such as optim.lr")
        inner = values
        for name in above:
            inner = inner.setdefault(name, {})
            if not isinstance(inner, dict):
                raise UserError(f"{origin}: {key} and {name} are both given; remove one of them")
        if last in inner:
            raise UserError(f"{origin}: {key} is given twice; remove one of them")
        inner[last] = deepcopy(value)
    return _combine(config, None, [Layer(origin, values)], imports=False)[0]


def change(config: RunConfig, **keys: JsonObject) -> RunConfig:
    """Return the configuration with other values, checked: `change(config, run={"resume": ""})`."""
    values = config.model_dump()
    changed = _validate(values | {name: {**values[name], **new} for name, new in keys.items()})
    check_config(changed)
    return changed


def create_parser() -> argparse.ArgumentParser:
    """Return the parser of `python main.py --help`, with one flag for each key."""
    return _create_source().root_parser


@cache
def _create_source() -> CliSettingsSource[Any]:
    """Create the parser and what reads its answers, once a process: with all keys it is slow."""
    parser = _ConfigParser(
        prog="python main.py",
        description="Train and distil models on TPUs, GPUs and CPUs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="python main.py [--config FILE.yaml] [--preset NAME] [--KEY VALUE | --KEY=VALUE ...]",
    )
    add = parser.add_argument
    add("--config", metavar="FILE", default=None, help="YAML file of the run")
    presets = ", ".join(list_presets())
    add("--preset", metavar="NAME", default=None, help=f"preset that overrides the file: {presets}")
    add(ERRORS_FLAG, choices=ERROR_FORMS, default="text", help="form of an error on stderr")
    add(
        *("--print-config", "--print_config"),
        action="store_true",
        help="print the resolved YAML with the origin of each key, and exit",
    )
    source: CliSettingsSource[Any] = CliSettingsSource(
        _Settings, root_parser=parser, formatter_class=parser.formatter_class
    )
    for action in parser._actions:
        action.help = _describe(action)
    return source


def dump_config(config: RunConfig) -> str:
    """Format the configuration as YAML that `load_config` reads back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def validate_config(values: JsonObject) -> RunConfig:
    """Return the configuration of whole values, once the modules of its run.imports are there."""
    import_modules(_find_own_code(values))
    return _validate(values)


def _find_own_code(values: JsonObject) -> OwnCode:
    """Return the modules of values that are not validated yet; empty unless they are names."""
    run = values.get("run")
    names = run.get("imports") if isinstance(run, dict) else None
    if not isinstance(run, dict) or not isinstance(names, list):
        return NO_CODE
    known = [name for name in names if isinstance(name, str)]
    return OwnCode(known if known == names else (), str(run.get("import_dir") or ""))


def _combine(
    config: str | None, preset: str | None, above: Sequence[Layer], *, imports: bool
) -> tuple[RunConfig, list[Layer]]:
    layers = [*read_layers(config, preset), *above]
    code = _find_own_code(merge_layers(layers))
    if code.names:
        folder = os.path.normpath(Path(code.folder or Path(config or "").parent).absolute())
        if folder != code.folder:
            origin = find_origin(layers, ("run", "imports"))
            layers.append(Layer(origin, {"run": {"import_dir": folder}}))
        import_modules(OwnCode(code.names if imports else (), folder))
    combined = _validate(merge_layers(layers), layers)
    if not combined.run.experiment:
        name, origin = _choose_experiment(config, preset, combined)
        layers.append(Layer(origin, {"run": {"experiment": name}}))
        combined = _validate(merge_layers(layers), layers)
    check_config(combined)
    return combined, layers


def _read_flags(namespace: argparse.Namespace) -> JsonObject:
    # A copy, since reading changes it and programs read in several threads.
    source = copy(_create_source())
    try:
        overrides = source(parsed_args=vars(namespace))()
    except SettingsError as error:
        raise UserError(
            f"command line: {error}; write a list as '[a, b]' and a mapping as '{{name: value}}'"
        ) from error
    return {name: values for name, values in overrides.items() if name in RunConfig.model_fields}


def _choose_experiment(path: str | None, preset: str | None, config: RunConfig) -> tuple[str, str]:
    """Return the config's file name, or the model's, and its origin.

    A preset's runs are separate: `--resume auto` must not continue a quick test.
    """
    name, origin = config.model.name, "model.name"
    if path is not None:
        name, origin = Path(path).stem, "the config's file name"
        if not re.fullmatch(r"[\w-][\w.-]*", name):
            raise UserError(
                f"run.experiment: the config's file name ({name!r}) is not a directory name; "
                "rename the file, or set --run.experiment"
            )
    if preset is None:
        return name, origin
    return f"{name}_{preset}", f"{origin} and the preset"


def _describe(action: argparse.Action) -> str | None:
    """Return the help of a flag; `--model` is a section too, so its alias is added here."""
    name = next((word[2:] for word in action.option_strings if word[2:] in get_keys()), None)
    if name is None:
        return action.help
    also = "; also --model" if name == "model.name" else ""
    return f"{action.help}{also} {describe_key(get_keys()[name])}".rstrip()


def _validate(values: JsonObject, layers: Sequence[Layer] = ()) -> RunConfig:
    """Validate values; with several files, an error names the file of its value."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        refusal, place = explain(error)
        origin = find_origin(layers, place)
        known = {layer.origin for layer in layers} - {COMMAND_LINE}
        if len(known) > 1 and origin not in (COMMAND_LINE, DEFAULT):
            refusal.args = (f"{refusal} (in {origin})",)
        raise refusal from error
