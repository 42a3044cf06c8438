"""`load_config`: a YAML file and flags become one frozen, validated `RunConfig`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from utils.config.aliases import ALIASES
from utils.config.checks import check_config
from utils.config.sections import (
    DataSection,
    DistillSection,
    ModelSection,
    OptimSection,
    ProfileSection,
    RunSection,
    RuntimeSection,
    Section,
    TrainSection,
)
from utils.errors import UserError, get_hint

_EPILOG = """\
Every key may stand in the YAML file of --config and on the command line (--a.b=v or --a.b v);
the command line wins. --batch_size is the global batch of one optimizer step, --update_freq
splits it into micro-batches; --kd, --kd_alpha and --kd_temperature fill one distillation term.
"""


class RunConfig(Section):
    """The whole configuration of a run."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    optim: OptimSection = OptimSection()
    train: TrainSection = TrainSection()
    distill: DistillSection = DistillSection()
    runtime: RuntimeSection = RuntimeSection()
    profile: ProfileSection = ProfileSection()
    run: RunSection = RunSection()


class _Settings(RunConfig, BaseSettings):
    """`RunConfig` as pydantic-settings reads it from the command line."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        cli_avoid_json=True,
        cli_use_class_docs_for_groups=True,
        cli_shortcuts=ALIASES,
    )


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, with the nearest right flag."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"command line: {message}; see python main.py --help")


def load_config(argv: Sequence[str]) -> RunConfig:
    """The configuration of `--config FILE` overridden by the other flags.

    Prints the help and exits for `--help`.

    Raises:
      UserError: unknown key, wrong type, value out of range, or keys that contradict each other.
    """
    parser = create_parser()
    namespace, rest = parser.parse_known_args(_spell_out(argv))
    if rest:
        _refuse_unknown_flag(rest[0])
    source = CliSettingsSource(
        _Settings, root_parser=_Parser(prog="python main.py", add_help=False)
    )
    try:
        overrides = source(parsed_args=vars(namespace))()
    except SettingsError as error:
        raise UserError(
            f"command line: {error}; write a list as '[a, b]' and a mapping as '{{name: value}}'"
        ) from error
    overrides.pop("config", None)
    values = _merge(_read_yaml(namespace.config), overrides)
    config = _validate(values)
    if not config.run.experiment:
        name = Path(namespace.config).stem if namespace.config else config.model.name
        config = _validate(_merge(values, {"run": {"experiment": name}}))
    check_config(config)
    return config


def create_parser() -> argparse.ArgumentParser:
    """The parser behind `python main.py --help`: one flag for each key."""
    parser = _Parser(
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


def iterate_keys(section: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[str]:
    """All keys of the configuration in order, as `section.key`."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from iterate_keys(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def dump_config(config: RunConfig) -> str:
    """The configuration as YAML that `load_config` reads back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with the keys of `over` on top, section by section."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _describe(action: argparse.Action) -> str | None:
    """The help text of a flag; `--model` is a section too, so its alias is told here."""
    if "--model.name" in action.option_strings:
        return f"{action.help}; also --model"
    return action.help


def _get_type(key: str) -> Any:
    """The annotation of `section.key`; none for an unknown one."""
    section, _, name = key.partition(".")
    owner = RunConfig.model_fields.get(section)
    field = owner.annotation.model_fields.get(name) if owner else None
    return field.annotation if field else None


def _spell_out(argv: Sequence[str]) -> list[str]:
    """Flags as the parser wants them: `--model` by key, a bare switch as `=true`, YAML as JSON."""
    key_of = {alias: key for key, aliases in ALIASES.items() for alias in aliases}
    out: list[str] = []
    before = ""
    for position, token in enumerate(argv):
        flag, equals, value = token.partition("=")
        name = flag.removeprefix("--")
        if flag == "--model":
            token = f"--model.name{equals}{value}"
        elif not token.startswith("--"):
            token = _to_json(before, token)
        elif equals:
            token = f"{flag}={_to_json(name, value)}"
        elif _get_type(key_of.get(name, name)) is bool:
            following = argv[position + 1] if position + 1 < len(argv) else ""
            if following.lower() not in ("true", "false", "1", "0", "yes", "no", "on", "off"):
                token = f"{token}=true"
        before = name
        out.append(token)
    return out


def _to_json(key: str, value: str) -> str:
    """A list or mapping on the command line may be written as in the YAML file.

    Raises:
      UserError: neither YAML nor JSON.
    """
    kind = _get_type(key)
    kinds = {get_origin(one) for one in (kind, *get_args(kind))}
    if not kinds & {dict, list, tuple} or not value.startswith(("{", "[")):
        return value
    try:
        return json.dumps(yaml.safe_load(value))
    except (yaml.YAMLError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"--{key} ({value!r}) is no list or mapping: {reason}; write [a, b] or {{name: value}}"
        ) from error


def _refuse_unknown_flag(token: str) -> NoReturn:
    name = token.partition("=")[0].removeprefix("--")
    if not token.startswith("--"):
        raise UserError(f"command line: {token!r} belongs to no flag; write --KEY VALUE")
    known = [*iterate_keys(), "config", *(a for aliases in ALIASES.values() for a in aliases)]
    raise UserError(f"unknown flag --{name}; {_get_near_keys(name, known)}")


def _get_near_keys(name: str, known: list[str]) -> str:
    """A hint by the whole key or, where that finds nothing, by its last word."""
    hint = get_hint(name, known)
    if hint.startswith("did you mean"):
        return hint
    last = name.rpartition(".")[2]
    same = [key for key in known if key.rpartition(".")[2] == last]
    if same:
        return "did you mean " + " or ".join(repr(key) for key in same) + "?"
    section = name.partition(".")[0]
    in_section = [key for key in known if key.startswith(f"{section}.")]
    if in_section:
        return f"keys of {section}: " + ", ".join(k.partition(".")[2] for k in in_section)
    return "see python main.py --help"


def _read_yaml(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"--config {path}: {error.strerror or error}; give a readable YAML file"
        ) from error
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"--config {path} is not valid YAML: {reason}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"--config {path} holds a {type(values).__name__}; write sections of keys")
    return values


def _validate(values: dict[str, Any]) -> RunConfig:
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise UserError(_explain(error)) from error


def _explain(error: ValidationError) -> str:
    """The first problem of a validation in one line: key, value, rule, way out."""
    problem = error.errors()[0]
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key}; {_get_near_keys(key, list(iterate_keys()))}"
    if problem["type"] == "missing":
        return f"{key} is missing; give it a value"
    rule = problem["msg"][0].lower() + problem["msg"][1:]
    more = f" ({error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{key} ({problem['input']!r}): {rule}; see python main.py --help{more}"
