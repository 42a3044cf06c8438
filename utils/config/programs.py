"""YAML files that run another program than main.py: `program:`, and `args:`, its flags."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from utils.config.yaml_file import read_yaml
from utils.errors import UserError, get_hint
from utils.json_types import JsonObject, JsonValue
from utils.storage.installation import ROOT

PROGRAM, ARGS = "program", "args"
_ROOMS = ("lab", "tools", "proofs", "bill")  # folders of programs
_FLAG = re.compile(r"[a-z][\w.-]*", re.ASCII)


@dataclass(frozen=True)
class ProgramFile:
    """A program and its arguments."""

    name: str  # for `python -m`
    module: str  # that has its `main`
    words: tuple[str, ...]

    @property
    def command(self) -> str:
        """Format the command that runs it here."""
        return shlex.join(["python", "-m", self.name, *self.words])


def read_program(path: str, reason: str = "--config") -> ProgramFile | None:
    """Read a file's program; None if it configures a run, UserError if it is wrong."""
    values = read_yaml(path, reason)
    return create_program(values, f"{reason} {path}") if PROGRAM in values else None


def refuse_program(values: JsonObject, path: str, reason: str) -> None:
    """Raise a UserError that says what runs a file, unless it configures a run."""
    if PROGRAM in values:
        program = create_program(values, f"{reason} {path}")
        raise UserError(
            f"{reason} {path} is run by {program.name}, not by main.py; use `{program.command}`, "
            f"or on a TPU `bash scripts/launch_tpu.sh ACCELERATOR {Path(path).stem}`"
        )


def create_program(values: JsonObject, place: str) -> ProgramFile:
    """Check a file's values; `place` begins each error."""
    unknown = [key for key in values if key not in (PROGRAM, ARGS)]
    if unknown:
        raise UserError(
            f"{place}: {unknown[0]} is no key of a file with {PROGRAM}; use {PROGRAM} and {ARGS}"
        )
    name, arguments = values[PROGRAM], values.get(ARGS)
    modules = _list_programs()
    if not isinstance(name, str) or name not in modules:
        hint = get_hint(name, list(modules)) if isinstance(name, str) else "such as lab.matmul"
        raise UserError(f"{place}: {PROGRAM} ({name!r}) is no program of this repository; {hint}")
    if not isinstance(arguments or {}, dict):
        raise UserError(
            f"{place}: {ARGS} ({arguments!r}) must name flags; write {ARGS}: {{flag: value}}"
        )
    words = [
        word for flag, value in (arguments or {}).items() for word in _write(flag, value, place)
    ]
    return ProgramFile(name, modules[name], tuple(words))


def _write(flag: str, value: JsonValue, place: str) -> list[str]:
    """Write a flag: true gives it alone, false and null leave it out, a list gives many values."""
    flag = "on" if flag is True else flag  # YAML reads the key `on` as true
    values = value if isinstance(value, list) else [value]
    is_plain = all(isinstance(item, str | int | float) for item in values)
    if not _FLAG.fullmatch(str(flag)) or not (value is None or (values and is_plain)):
        raise UserError(
            f"{place}: {ARGS}.{flag} ({value!r}) is no flag; write its name without dashes and a "
            "text, number, true, false or a list of them"
        )
    if value is None or isinstance(value, bool):
        return [f"--{flag}"] if value else []
    if isinstance(value, list):
        return [f"--{flag}", *map(str, values)]
    return [f"--{flag}={value}"]


def _list_programs() -> dict[str, str]:
    """Map each program, as `python -m` takes it, to the module that has its `main`."""
    modules: dict[str, str] = {}
    for path in sorted(path for room in _ROOMS for path in (ROOT / room).rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if not path.stem.endswith("_child") and "\nif __name__ ==" in path.read_text("utf-8"):
            modules[module.removesuffix(".__main__")] = module
    return modules
