"""The launch commands that the documentation shows, and what their dry run prints."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import re
import shlex
import sys
from collections.abc import Sequence
from types import ModuleType

from tools.__main__ import OLD_NAMES

_WIDTH = 96
# A program that a document may call -> the module whose dry run it is, and words put before.
_SCRIPTS = {
    "train/sky/launch_tpu.sh": ("train.sky.cluster", ["launch"]),
    "train/sky/sync_code.sh": ("train.sky.cluster", ["sync"]),
    "scripts/launch_tpu.sh": ("train.sky.cluster", ["launch"]),
}


def find_launch(command: str) -> tuple[str, list[str]] | None:
    """(module, its words) of a launch command; none: it is another one."""
    tokens = shlex.split(command)
    if tokens[:2] == ["python", "-m"] and (tokens[2].startswith("train.") or _asks_a_pod(tokens)):
        return tokens[2], tokens[3:]
    if tokens[0] == "bash" and len(tokens) > 1 and tokens[1] in _SCRIPTS:
        module, words = _SCRIPTS[tokens[1]]
        return module, [*words, *tokens[2:]]
    return None


def split_program(words: Sequence[str]) -> tuple[str, list[str]]:
    """The module that Python is asked to run, by `-m NAME` or by a path, and the flags for it."""
    if words[0] == "-m":
        return words[1], list(words[2:])
    return words[0].removesuffix(".py").replace("/", "."), list(words[1:])


def import_program(name: str) -> ModuleType:
    """The module that `python -m NAME` runs: a package keeps its program in `__main__`.

    Raises:
      AssertionError: it is not there.
    """
    new = OLD_NAMES.get(f"python -m {name}", "").removeprefix("python -m ")
    if new and " " not in new:
        name = new
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        spec = None
    assert spec is not None, f"{name} is not there"
    is_package = spec.submodule_search_locations is not None
    module = importlib.import_module(f"{name}.__main__" if is_package else name)
    # An old name of a program holds the main of another module.
    return sys.modules[getattr(module.main, "create_parser", module.main).__module__]


def show_dry(command: str) -> list[str]:
    """The lines that a launch command's dry run prints.

    Raises:
      AssertionError: it is refused.
    """
    launch = find_launch(command)
    assert launch is not None, command
    module, words = launch
    place = words.index("--") if "--" in words else len(words)
    words = [*words[:place], "--dry-run", *words[place:]]
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = import_program(module).main(words)
    assert code == 0, f"{command}: {errors.getvalue()}"
    return output.getvalue().splitlines()


def wrap(line: str) -> str:
    """A command over several lines, broken between its words."""
    lines, words = [""], re.findall(r"""(?:[^\s'"]|'[^']*'|"[^"]*")+""", line)
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) > _WIDTH:
            lines[-1] += " \\"
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)


def _asks_a_pod(tokens: list[str]) -> bool:
    return tokens[2] == "tools.doctor" and any(token.startswith("--tpu") for token in tokens)
