"""The documented commands, and a dry run for each kind of them.

A dry form does everything short of the long part: it parses every flag by the program's own parser
and, for main.py, makes all checks that need no device. A command without one is an error.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from job.check import check
from tests.support.documented_launches import find_launch, import_program, show_dry, split_program
from tools.__main__ import list_verbs
from utils.config.load import RunConfig, change, load_config
from utils.programs import CommandLine, get_run_flags

ROOT = Path(__file__).resolve().parents[2]
_PLACES = ("data", "/data")
_FENCE = re.compile(r"(?P<indent>\s*)(?P<mark>`{3,}|~{3,})\s*(?P<kind>[\w+-]*)")
_SHELLS = ("bash", "sh", "shell", "zsh", "console", "shell-session", "bash-session", "terminal")
_TYPED = re.compile(
    r"\s*(\$ |>? ?python3? (main\.py|-m (tools|proofs|lab|bill|train)\.|tools/)|bash run_commands)"
)


@dataclass(frozen=True)
class Places:
    """Real directories for those that the documentation names.

    Attributes:
      data_root: instead of `data`: holds the digits. Beside it lie the `shapes` of
        examples/own_images and, instead of `runs/own_images/...`, an untrained model of them.
      run: instead of any `runs/...`: a finished run of configs/digits_student.yaml.
      teacher: instead of `runs/digits_teacher/...`: that model, exported.
      text: instead of `data`: holds small texts; instead of `runs/transformer_teacher/...`, too,
        and its folder `full` instead of `runs/delta_text/...`.
      rows: instead of `runs/friedman1_teacher/...`: that model, exported.
      scratch: where a dry form may write.
    """

    data_root: Path
    run: Path
    teacher: Path
    text: Path
    rows: Path
    scratch: Path


class UnknownCommandError(AssertionError):
    """A documented command that is neither run nor given a dry form."""


def list_documents() -> list[Path]:
    """Every Markdown file of the repository but those that programs wrote for tests."""
    # Hidden folders hold environments, whose thousands of folders take a second.
    tops = [path for path in ROOT.iterdir() if not path.name.startswith(".")]
    found = [path for top in tops for path in (top.rglob("*.md") if top.is_dir() else [top])]
    fixtures = ROOT / "tests" / "fixtures"
    return sorted(p for p in found if p.suffix == ".md" and not p.is_relative_to(fixtures))


def find_uncollected(text: str) -> list[str]:
    """Blocks that a reader may type from, but `read_commands` does not see.

    Commands stand in ```bash blocks at the margin; a block of another kind, or of none, must not
    begin a line with a program of this repository or a prompt.
    """
    wrong, kind = [], None
    for number, line in enumerate(text.splitlines(), start=1):
        fence = _FENCE.match(line)
        if fence and kind is None:
            kind = fence["kind"]
            is_margin = not fence["indent"] and fence["mark"] == "```"
            if kind.lower() in _SHELLS and (kind != "bash" or not is_margin):
                wrong.append(f"line {number}: {line.strip()}")
        elif fence and not fence["kind"]:
            kind = None
        elif kind is not None and kind.lower() not in _SHELLS and _TYPED.match(line):
            wrong.append(f"line {number}: {line.strip()}")
    return wrong


def read_commands(text: str) -> list[str]:
    """The commands of all ```bash blocks, one string each, without comments."""
    commands = []
    for block in re.findall(r"^```bash\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        joined = block.replace("\\\n", " ")
        for line in joined.splitlines():
            tokens = shlex.split(line, comments=True)
            if tokens:
                commands += [shlex.join(part) for part in _split_chain(tokens)]
    return commands


def run_dry(command: str, places: Places) -> str:
    """Do a command's dry form; says which one it was.

    Raises:
      UnknownCommandError: it has none.
    """
    tokens = shlex.split(command)
    while tokens and re.fullmatch(r"[A-Z_]+=.*", tokens[0]):
        tokens = tokens[1:]
    if find_launch(shlex.join(tokens)) is not None:
        program = tokens[tokens.index("--") + 1 :] if "--" in tokens else []
        if "main.py" in program:
            load_config(program[program.index("main.py") + 1 :])
        return "shown: " + "; ".join(show_dry(shlex.join(tokens)))
    program = Path(tokens[0]).name
    if program in ("python", "python3", "python3.11") and tokens[1] == "main.py":
        return _check_run(tokens[2:], places)
    if program == "torchrun":
        return _check_run(tokens[tokens.index("main.py") + 1 :], places)
    if program == "python" and tokens[1].startswith("examples/"):
        assert (ROOT / tokens[1]).is_file()
        return "a script: tests/test_examples.py"
    if program in ("python", "python3", "python3.11") and _is_tool(tokens[1:]):
        return _parse_tool(tokens[1:], places)
    if program == "tpudistil":
        return _check_verb(tokens[1:], places)
    if tokens == ["python", "-m", "pip", "install", "."]:
        return "installs the wheel: tests/test_package.py"
    if tokens[:2] == ["bash", "run_commands.sh"]:
        return _show_script(tokens[2:], places)
    if tokens in (["source", ".venv/bin/activate"],):
        return "activate: `run_commands.sh setup` makes it"
    raise UnknownCommandError(f"{command!r} is neither run by a test nor given a dry form")


def need_device(config: RunConfig) -> None:
    """Skip the test of a run for a device whose package is not installed."""
    if config.runtime.device == "xla":
        pytest.importorskip("torch_xla", reason="torch_xla is not installed")


def place_flag(flag: str, places: Places) -> str:
    """A flag with the run directories of the documentation replaced by real ones."""
    found = re.match(r"(--[\w.]+=)?(runs/.*)$", flag)
    if not found:
        return flag
    known = {
        "digits_teacher": places.teacher,
        "transformer_teacher": places.text,
        "delta_text": places.text / "full",
        "friedman1_teacher": places.rows,
        "own_images": places.data_root.parent / "own_images",
    }
    target = known.get(found[2].split("/")[1], places.run)
    return f"{found[1] or ''}{target}"


def start_script(
    arguments: Sequence[str], folder: Path, root: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """run_commands.sh with an environment that is up to date and a Python that tells its call."""
    venv = folder / "venv"
    trainer = (ROOT / "requirements.txt").read_bytes()
    torch = (b"torch==", b"torchvision==", b"torch_xla==")
    rest = b"".join(line for line in trainer.splitlines(True) if not line.startswith(torch))
    names = ("dev", "service", "export", "jax-export", "delta", "torch-tpu", "mirrors", "compiler")
    lists = {name: (ROOT / f"requirements-{name}.txt").read_bytes() for name in names}
    parts = {f".extra-{name}": trainer + lists[name] for name in names[:3]}
    more = {f".extra-{name}": trainer + lists[name] for name in names[3:5]}
    is_all = {"test-all", "proofs"} & set(arguments)
    more = {**more, ".extra-tpu-compiler": trainer} if is_all else {}
    stamp_environment(venv, {".requirements.sha256": trainer, **parts, **more})
    of_tpu = {".torch-tpu.sha256": rest + lists["torch-tpu"], **parts}
    stamp_environment(folder / "venv-tpu", of_tpu)
    for name in ("mirrors", "compiler"):
        stamp_environment(folder / f"venv-{name}", {".requirements.sha256": lists[name]})
    # `true` stands for a Python that fits, whatever this machine has.
    environment = {**os.environ, "PYTHON": "true", "VENV": str(venv)}
    return subprocess.run(
        ["bash", "run_commands.sh", *arguments],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
    )


def stamp_environment(venv: Path, stamps: Mapping[str, bytes]) -> None:
    """Make an environment that is up to date, with a Python that prints its call.

    Args:
      stamps: the lists of requirements that are installed, by the stamp's file.
    """
    (venv / "bin").mkdir(parents=True, exist_ok=True)
    for name, lists in stamps.items():
        (venv / name).write_text(hashlib.sha256(lists).hexdigest() + "\n")
    python = venv / "bin" / "python"
    python.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "CALL" "$@"\n')
    python.chmod(0o755)


def get_call(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What the script would have given to Python."""
    lines = done.stdout.splitlines()
    return lines[lines.index("CALL") + 1 :]


def _split_chain(tokens: Sequence[str]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for token in tokens:
        if token in ("&&", ";"):
            parts.append([])
        else:
            parts[-1].append(token)
    return [part for part in parts if part]


def _check_verb(words: Sequence[str], places: Places) -> str:
    """A verb of the installed program, as its program of a checkout."""
    if words == ["--help"]:
        return "help: tests/test_package.py"
    verb, *flags = words
    if verb == "train":
        return _check_run(flags, places)
    return _parse_tool(["-m", list_verbs()[verb].removesuffix(".__main__"), *flags], places)


def _check_run(flags: Sequence[str], places: Places) -> str:
    if flags == ["--help"]:
        return "help: tests/utils/test_config.py"
    # What is printed is the subject of tests/utils/test_layers.py.
    flags = [flag for flag in flags if flag != "--print-config"]
    # Stored answers belong to one teacher: tests/test_documented_runs.py makes and replays them;
    # statistics likewise: tests/tasks/test_feature_statistics.py.
    stored = ("--distill.teacher_cache=", "--distill.standardise=", "--distill.statistics=")
    flags = [flag for flag in flags if not flag.startswith(stored)]
    if any(flag.startswith("examples/own_loss/") for flag in flags):
        # What a run imports would stay in this process.
        return "own code: tests/test_examples.py"
    config = load_config([place_flag(flag, places) for flag in flags])
    need_device(config)
    moves = config.data.source in ("tfds", "tokens") and config.data.root in _PLACES
    root = str(places.data_root) if moves else config.data.root
    root = str(places.text) if config.data.source == "tokens" else root
    root = str(places.data_root.parent / root) if root == "shapes" else root
    run = {"output_dir": str(places.scratch / "runs")}
    check(change(config, data={"root": root}, run=run))
    return "checked: all that main.py does before a device"


def _is_tool(words: Sequence[str]) -> bool:
    return split_program(words)[0].startswith(("tools.", "proofs.", "lab.", "bill."))


def _parse_tool(words: Sequence[str], places: Places) -> str:
    name, flags = split_program(words)
    module = import_program(name)
    flags = [place_flag(flag, places) for flag in flags]
    parse: Callable[..., Any]
    if isinstance(module.main, CommandLine):
        parse = module.main.parse
    elif hasattr(module, "create_parser"):
        parse = module.create_parser().parse_args
    else:
        parse = module.parse_arguments
    try:
        parsed = parse(flags)
    except SystemExit as error:
        assert error.code == 0, f"{name} does not take {flags}"
        return "help"
    if isinstance(module.main, CommandLine) and (getattr(parsed, "config", "") or parsed.rest):
        load_config([*get_run_flags(parsed), "--run.resume="])
    elif isinstance(parsed, tuple):
        config = getattr(parsed[0], "config", None)
        named = ["--config", str(config)] if config else []
        load_config([*named, *parsed[1], "--run.resume="])
    return f"parsed: by {name}"


def _show_script(arguments: Sequence[str], places: Places) -> str:
    done = start_script(arguments, places.scratch)
    assert done.returncode == 0, done.stderr
    if arguments[0] in ("setup", "help"):
        return "shown: nothing is called"
    call = get_call(done)
    if call[:2] == ["-m", "pytest"]:
        named = [word for word in call[2:] if word.startswith("tests/")]
        assert all((ROOT / word.partition("::")[0]).exists() for word in named)
        return "shown: pytest"
    if call[:2] == ["-m", "train.xla_dist"]:
        return run_dry(shlex.join(["python", *call]), places)
    if call[0] == "main.py":
        return _check_run(call[1:], places)
    return _parse_tool(call, places)
