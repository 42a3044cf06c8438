"""Finds what an experiment's YAML runs, main.py or a program, and the bucket for its results."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from train.execute import ROOT
from utils.errors import UserError
from utils.programs import CommandLine, get_run_flags
from utils.registry import load_object

if TYPE_CHECKING:
    from utils.config.programs import ProgramFile

# Of the environment; a SkyPilot task uses the same name for the root of the run store.
OUTPUT = "OUTPUT_DIR"
STORE = "--store"
_BUCKET = re.compile(r"gs://[^\s/]+(/\S*)?")
# Programs of this folder measure one device.
_SINGLE = "lab."
_LOAD = "utils.config.load:load_config"


def find_config(experiment: str) -> str:
    """Find an experiment's YAML, relative to the repository's root; a UserError if missing."""
    folders = ("", "configs/", "configs/lab/")
    for path in (f"{folder}{experiment}{end}" for folder in folders for end in ("", ".yaml")):
        if path.endswith(".yaml") and (ROOT / path).is_file():
            return path
    raise UserError(f"experiment {experiment!r} is no file configs/{experiment}.yaml; see configs/")


def find_program(config: str, *, hosts: int = 1) -> ProgramFile | None:
    """Return the program that a YAML names, or None if it configures a run of main.py.

    Raises:
      UserError: the file is wrong, or its program cannot use several hosts.
    """
    # Not above: the doctor runs where no package is installed.
    from utils.config.programs import read_program

    program = read_program(str(ROOT / config), "experiment")
    if program:
        check_hosts(["-m", program.name], hosts)
    return program


def check_hosts(words: Sequence[str], hosts: int) -> None:
    """Raise a UserError if a command runs a lab, and the slice has several hosts."""
    names = [name for flag, name in itertools.pairwise(words) if flag == "-m"]
    lab = next((name for name in names if name.startswith(_SINGLE)), "")
    if lab and hosts > 1:
        raise UserError(
            f"{lab} measures one device, and this slice has {hosts} hosts; choose a "
            "slice of one host"
        )


def find_output(flag: str | None, config: str, flags: Sequence[str] = ()) -> tuple[str, str]:
    """Find the store of the results and its origin: the flag, a run's config, or the environment.

    A configuration or program is read with its flags, so that an invalid one is refused here.

    Raises:
      UserError: the store is no bucket, or configuration or flags cannot be read.
    """
    program = find_program(config)
    key, value = f"run.output_dir of {config}", ""
    load_config = _load(_LOAD, config) if program is None else None
    if load_config:
        value = load_config(["--config", str(ROOT / config), *flags]).run.output_dir
    if flag is not None:
        key, value = "--output", flag
    elif "://" not in value and os.environ.get(OUTPUT):
        key, value = OUTPUT, os.environ[OUTPUT]
    elif program is not None:
        key = "the bucket for results"
    if not _BUCKET.fullmatch(value):
        raise UserError(
            f"{key} ({value}) is no gs:// URL, and a machine's disk goes with the machine; give "
            f"--output gs://BUCKET/runs, or once for all `export {OUTPUT}=gs://BUCKET/runs`"
        )
    if program is not None:
        check_words(program, [*flags, f"{STORE}={value}"], config)
    return value, key


def check_words(program: ProgramFile, words: Sequence[str], config: str) -> None:
    """Parse a program's arguments, and the configuration of a run that it takes; UserError."""
    main = _load(f"{program.module}:main", config)
    if not isinstance(main, CommandLine):
        return
    text = io.StringIO()
    try:
        with contextlib.redirect_stderr(text):
            options = main.parse([*program.words, *words])
    except SystemExit as error:
        line = text.getvalue().strip().removeprefix("error: ")
        raise UserError(f"{config}: {line or 'its flags ask for no work'}") from error
    if main.takes_keys:
        load_object(_LOAD)(get_run_flags(options))


def expand(words: Sequence[str]) -> list[str]:
    """Replace an experiment's YAML, the first word, by the command that runs it on a machine.

    Raises:
      UserError: the YAML is wrong or missing, or there is no bucket for a program's results.
    """
    if not words or not words[0].endswith(".yaml"):
        return list(words)
    config, flags = find_config(words[0]), list(words[1:])
    program = find_program(config)
    if program is None:
        return ["python", "main.py", "--config", config, *flags]
    if not any(word.partition("=")[0] == STORE for word in flags):
        flags.append(f"{STORE}={find_output(None, config, flags)[0]}")
    check_words(program, flags, config)
    return ["python", "-m", program.name, *program.words, *flags]


def _load(name: str, config: str) -> Any:
    """Import what checks a file; None, after a line on stderr, where its packages are missing."""
    try:
        return load_object(name)
    except (ModuleNotFoundError, AttributeError) as error:
        sys.stderr.write(f"{config} is not checked here, but on the machine: {error}\n")
        return None
