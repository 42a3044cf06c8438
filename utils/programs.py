"""Command-line programs: help from docstrings, one-line errors, exit codes."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from utils.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR, UserError
from utils.log import setup_logging
from utils.registry import load_object
from utils.storage.installation import name_commands

ERRORS_FLAG, ERROR_FORMS = "--errors", ("text", "json")
_ERROR_FORM = ContextVar("error_form", default="text")
_PICTURES = (".png", ".svg", ".pdf")


class ProgramParser(argparse.ArgumentParser):
    """A parser with one-line errors whose type `Path` refuses URLs."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.prog = name_commands(self.prog)
        self.register("type", Path, _read_path)
        text = "form of an error on stderr (text; docs/errors.md)"
        hidden = argparse.SUPPRESS
        self.add_argument(
            ERRORS_FLAG, action=_SetForm, choices=ERROR_FORMS, default=hidden, help=text
        )

    def format_help(self) -> str:
        return name_commands(super().format_help())

    def error(self, message: str) -> NoReturn:
        sentence = f"{message}; see {self.prog} --help"
        write_error(UserError(sentence, code="usage.invalid"))
        self.exit(EXIT_USER_ERROR)


class _SetForm(argparse.Action):
    """Chooses the form of errors in programs that are no `CommandLine`."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        _ERROR_FORM.set(values)


def _read_path(text: str) -> Path:
    """Convert a path; `Path` would accept gs://bucket/x, and create a directory `gs:`."""
    # Imported here, because the doctor also runs without fsspec.
    from utils.storage.places import to_path

    try:
        return to_path(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


class DefaultsHelp(argparse.ArgumentDefaultsHelpFormatter):
    """Help with the default of each flag."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default == {}:
            return action.help
        return super()._get_help_string(action)


def create_program_parser(description: str | None, **options: object) -> ProgramParser:
    """Create a parser whose help keeps the lines of a docstring, with options of argparse."""
    formatter = argparse.RawDescriptionHelpFormatter
    return ProgramParser(description=description, formatter_class=formatter, **options)


def create_defaults_parser(description: str | None, **options: object) -> ProgramParser:
    """Create a parser whose help is one paragraph and shows defaults, with options of argparse."""
    options = {"description": " ".join((description or "").split()), **options}
    return ProgramParser(formatter_class=DefaultsHelp, allow_abbrev=False, **options)


@dataclass(frozen=True)
class CommandLine:
    """A program: `main = CommandLine(create_parser, run)`; `main(argv)` gives its exit code."""

    create_parser: Callable[[], argparse.ArgumentParser]
    # Takes the flags; "module:function" is imported when the program runs, so that --help is fast.
    # None: the `run` of the sub-command.
    run: Callable[[argparse.Namespace], int | None] | str | None = None
    # Other flags are keys of a run's configuration, kept in `rest`; a sub-command may set its own.
    takes_keys: bool = False
    takes_command: bool = False  # words after `--` belong to another program, kept in `command`
    logs: bool = False  # whether the log goes to stderr
    interrupted: str = "interrupted"  # printed after Ctrl-C
    # Whether another process prints the errors
    is_silent: Callable[[], bool] = lambda: False

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        """Run the program with these words, or those of its process; return the exit code."""
        if self.logs:
            setup_logging()
        words = list(sys.argv[1:] if argv is None else argv)
        with choose_error_form(words, takes_command=self.takes_command) as rest:
            options, is_silent = self.parse(rest), self.is_silent()
            interrupted = self.interrupted
            return run_program(self._run, options, interrupted=interrupted, is_silent=is_silent)

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Read the flags; `rest` has the keys of a run's configuration, `words` all words."""
        parser = self.create_parser()
        words = list(sys.argv[1:] if argv is None else argv)
        end = words.index("--") if self.takes_command and "--" in words else len(words)
        options, rest = parser.parse_known_args(words[:end])
        if rest and not getattr(options, "takes_keys", self.takes_keys):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        options.rest = getattr(options, "rest", rest)
        options.words = words
        if self.takes_command:
            options.command = words[end + 1 :]
        return options

    def _run(self, options: argparse.Namespace) -> int | None:
        run = self.run or options.run
        return (load_object(run) if isinstance(run, str) else run)(options)


def get_run_flags(options: argparse.Namespace) -> list[str]:
    """Return the flags for `load_config`: --config if given, then the keys."""
    config = getattr(options, "config", None)
    return [*(["--config", str(config)] if config else []), *options.rest]


def require_at_least(least: int, options: argparse.Namespace, *names: str) -> None:
    """Raise a UserError for a flag whose number is too small; flags without a value pass."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not value >= least:  # so that NaN is refused, too
            flag = "--" + name.replace("_", "-")
            raise UserError(f"{flag} ({value:g}) must be at least {least}; raise it")


def run_program(
    function: Callable[..., int | None],
    *arguments: object,
    interrupted: str = "interrupted",
    is_silent: bool = False,
) -> int:
    """Call a program's function; return its exit code, 0 for None.

    A `UserError`, or an error of a store, becomes the line `error: ...` on stderr (unless another
    process prints it: `is_silent`) and code 2; Ctrl-C the line `interrupted` and code 130.
    """
    try:
        return function(*arguments) or 0
    except UserError as error:
        if not is_silent:
            write_error(error)
        return EXIT_USER_ERROR
    except OSError as error:
        # Only a program that has loaded this module can get its errors.
        storage = sys.modules.get("utils.storage.folder")
        if storage is None or not isinstance(error, storage.StorageError):
            raise
        if not is_silent:
            write_error(UserError(f"{error}; {error.WAY}", code="storage.failed"))
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        sys.stderr.write(f"{interrupted}\n")
        return EXIT_INTERRUPTED


@contextlib.contextmanager
def choose_error_form(words: Sequence[str], *, takes_command: bool = False) -> Iterator[list[str]]:
    """Print errors in the body as --errors says; yield the other words of the command line.

    Words after `--` are another program's if the program takes a command.
    """
    rest = list(words)
    end = rest.index("--") if takes_command and "--" in rest else len(rest)
    form = "text"
    for number, word in enumerate(rest[:end]):
        flag, equals, value = word.partition("=")
        value = value if equals else "".join(rest[number + 1 : end][:1])
        if flag == ERRORS_FLAG and value in ERROR_FORMS:  # others are refused by the parser
            form = value
            del rest[number : number + (1 if equals else 2)]
            break
    token = _ERROR_FORM.set(form)
    try:
        yield rest
    finally:
        _ERROR_FORM.reset(token)


def write_error(error: BaseException) -> None:
    """Write an error to stderr in one line, as a sentence or as JSON."""
    if _ERROR_FORM.get() == "json":
        # Imported here: most programs end without an error.
        from utils.error_codes import describe_error

        text = json.dumps(describe_error(error), default=str)
    else:
        text = f"error: {' '.join(str(error).split())}"
    sys.stderr.write(f"{name_commands(text)}\n")


@contextlib.contextmanager
def pause_collection() -> Iterator[None]:
    """Pause the garbage collector's search for cycles.

    Imports create hundreds of thousands of lasting objects, which Python would search again and
    again: a seventh of a run's start.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def prepare_folder(folder: Path | None, flag: str) -> None:
    """Create a directory for results, if given, before they are computed; a UserError if not."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{flag} ({str(folder)!r}) cannot be created: {error.strerror}; use another path"
        ) from error


def prepare_picture(path: Path | None, flag: str) -> None:
    """Check the suffix of a picture's path, then as `prepare_file`."""
    if path is not None and path.suffix not in _PICTURES:
        raise UserError(
            f"{flag} ({str(path)!r}) must end with one of {', '.join(_PICTURES)}; rename it"
        )
    prepare_file(path, flag)


def prepare_file(path: Path | None, flag: str) -> None:
    """Create the directory of a file, if given; a UserError if it cannot be written."""
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"{flag} ({str(path)!r}) is a directory; name a file in it")
    prepare_folder(path.parent, flag)
    with write_to(path, flag):
        tempfile.TemporaryFile(dir=path.parent).close()


@contextlib.contextmanager
def write_to(path: Path, flag: str) -> Iterator[None]:
    """Convert an OSError in the body, which writes to a flag's path, to a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{flag} ({str(path)!r}) cannot be written: {error.strerror or error}; use another path"
        ) from error
