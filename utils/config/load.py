"""`load_config`: a YAML file and flags become one frozen, validated `RunConfig`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import yaml
from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from utils.config.aliases import ALIASES
from utils.config.checks import check_config
from utils.config.command_line import refuse_unknown_flag, spell_out
from utils.config.explain import describe_key, explain
from utils.config.keys import get_keys
from utils.config.sections import RunConfig
from utils.config.yaml_file import read_yaml
from utils.errors import UserError
from utils.json_types import JsonObject

_EPILOG = """\
Every key may stand in the YAML file of --config and on the command line (--a.b=v or --a.b v);
the command line wins. --batch_size is the global batch of one optimizer step, --update_freq
splits it into micro-batches; --kd, --kd_alpha and --kd_temperature fill one distillation term.
none, null, ~ or nothing (--a.b=) sets a key that may be none back to it, and a list or mapping to
its default; a mapping's entries join those of the file, --model.args.depth=2 gives a single one.
Brackets tell what else holds for a key. On --resume another value is refused, unless it says
resume: free, resume: warns (it goes on, but bits may differ) or resume: between epochs.
"""


class _Settings(RunConfig, BaseSettings):
    """`RunConfig` as pydantic-settings reads it from the command line."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        cli_avoid_json=True,
        cli_use_class_docs_for_groups=True,
        cli_shortcuts=ALIASES,
    )


class _ConfigParser(argparse.ArgumentParser):
    """Says what is wrong in one line, with the nearest right flag."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"command line: {message}; see python main.py --help")


def load_config(argv: Sequence[str]) -> RunConfig:
    """The configuration of `--config FILE` overridden by the other flags.

    Prints the help and exits for `--help`.

    Raises:
      UserError: unknown key, wrong type, value out of range, or keys that contradict each other.
    """
    if not argv:
        raise UserError(
            "nothing to run; give --config configs/NAME.yaml, --help lists all keys, and README.md "
            "begins with two commands that work without data"
        )
    words, reset = spell_out(argv)
    namespace, rest = create_parser().parse_known_args(words)
    if rest:
        refuse_unknown_flag(rest[0])
    values = _merge(_drop(read_yaml(namespace.config), reset), _read_flags(namespace))
    config = _validate(values)
    if not config.run.experiment:
        name = _choose_experiment(namespace.config, config)
        config = _validate(_merge(values, {"run": {"experiment": name}}))
    check_config(config)
    return config


def change(config: RunConfig, **keys: JsonObject) -> RunConfig:
    """The configuration with other values, checked again: `change(config, run={"resume": ""})`.

    Raises:
      UserError: as in `load_config`.
    """
    values = config.model_dump()
    changed = _validate(values | {name: {**values[name], **new} for name, new in keys.items()})
    check_config(changed)
    return changed


def create_parser() -> argparse.ArgumentParser:
    """The parser behind `python main.py --help`: one flag for each key."""
    parser = _ConfigParser(
        prog="python main.py",
        description="Train and distil vision models on TPUs, GPUs and CPUs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="python main.py [--config FILE.yaml] [--KEY VALUE | --KEY=VALUE ...]",
    )
    parser.add_argument("--config", metavar="FILE", default=None, help="YAML file of the run")
    CliSettingsSource(_Settings, root_parser=parser, formatter_class=parser.formatter_class)
    for action in parser._actions:
        action.help = _describe(action)
    return parser


def dump_config(config: RunConfig) -> str:
    """The configuration as YAML that `load_config` reads back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _read_flags(namespace: argparse.Namespace) -> JsonObject:
    """The keys that the command line sets."""
    source = CliSettingsSource(
        _Settings, root_parser=_ConfigParser(prog="python main.py", add_help=False)
    )
    try:
        overrides = source(parsed_args=vars(namespace))()
    except SettingsError as error:
        raise UserError(
            f"command line: {error}; write a list as '[a, b]' and a mapping as '{{name: value}}'"
        ) from error
    overrides.pop("config", None)
    return overrides


def _choose_experiment(path: str | None, config: RunConfig) -> str:
    """The config's file name, or the model's."""
    if path is None:
        return config.model.name
    name = Path(path).stem
    if not re.fullmatch(r"[\w-][\w.-]*", name):
        raise UserError(
            f"run.experiment: the config's file name ({name!r}) is no directory name; rename the "
            "file, or set --run.experiment"
        )
    return name


def _drop(values: JsonObject, keys: Sequence[str]) -> JsonObject:
    """The file's values without those that the command line sets back."""
    for key in keys:
        section, _, name = key.partition(".")
        if isinstance(values.get(section), dict):
            values[section] = {k: v for k, v in values[section].items() if k != name}
    return values


def _merge(base: JsonObject, over: JsonObject) -> JsonObject:
    """`base` with the keys of `over` on top, section by section."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _describe(action: argparse.Action) -> str | None:
    """The help text of a flag; `--model` is a section too, so its alias is told here."""
    name = next((word[2:] for word in action.option_strings if word[2:] in get_keys()), None)
    if name is None:
        return action.help
    also = "; also --model" if name == "model.name" else ""
    return f"{action.help}{also} {describe_key(get_keys()[name])}".rstrip()


def _validate(values: JsonObject) -> RunConfig:
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise UserError(explain(error)) from error
