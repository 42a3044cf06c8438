"""Every program shows its docstring as help, and ends in one line and an exit code."""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from utils.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR, UserError
from utils.log import setup_logging
from utils.registry import load_object

_PICTURES = (".png", ".svg", ".pdf")


class ProgramParser(argparse.ArgumentParser):
    """Says what is wrong with the command line in one line; a `Path` is no URL."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)
        self.register("type", Path, _read_path)

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USER_ERROR, f"error: {message}; see {self.prog} --help\n")


def _read_path(text: str) -> Path:
    """`Path` would take gs://bucket/x, and make a directory `gs:` here."""
    from utils.storage.places import (
        to_path,  # the doctor also runs where fsspec is not installed yet
    )

    try:
        return to_path(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


class DefaultsHelp(argparse.ArgumentDefaultsHelpFormatter):
    """Says the default of each flag that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default == {}:
            return action.help
        return super()._get_help_string(action)


def create_program_parser(description: str | None, **options: object) -> ProgramParser:
    """A parser whose help keeps the lines of a docstring; `options` are those of argparse."""
    formatter = argparse.RawDescriptionHelpFormatter
    return ProgramParser(description=description, formatter_class=formatter, **options)


@dataclass(frozen=True)
class CommandLine:
    """A program: `main = CommandLine(create_parser, run)`; `main(argv)` gives its exit code.

    Attributes:
      run: takes the flags; "module:function" is imported when the program runs, so that --help
        waits for nothing. None: what the sub-command has set as `run`.
      takes_keys: other flags are keys of a run's configuration, kept in `rest`; a sub-command may
        set its own.
      takes_command: words behind `--` are of another program, kept in `command`.
      logs: the program's log goes to stderr.
      interrupted: printed after Ctrl-C.
    """

    create_parser: Callable[[], argparse.ArgumentParser]
    run: Callable[[argparse.Namespace], int | None] | str | None = None
    takes_keys: bool = False
    takes_command: bool = False
    logs: bool = False
    interrupted: str = "interrupted"

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        """Run the program with these words, None: those of its process; gives the exit code."""
        if self.logs:
            setup_logging()
        return run_program(self._run, self.parse(argv), interrupted=self.interrupted)

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Read the flags; `rest` are those that are keys of a run's configuration, `words` all."""
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
    """What a program was told of a run, for `load_config`: --config if given, then the keys."""
    config = getattr(options, "config", None)
    return [*(["--config", str(config)] if config else []), *options.rest]


def require_at_least(least: int, options: argparse.Namespace, *names: str) -> None:
    """Refuse flags whose numbers are too small; those that were not given pass.

    Args:
      names: of flags, as `options` has them.

    Raises:
      UserError: names the flag.
    """
    for name in names:
        value = getattr(options, name)
        if value is not None and not value >= least:  # so that NaN is refused, too
            flag = "--" + name.replace("_", "-")
            raise UserError(f"{flag} ({value:g}) must be {least} or more; change it")


def run_program(
    function: Callable[..., int | None],
    *arguments: object,
    interrupted: str = "interrupted",
    is_silent: bool = False,
) -> int:
    """Call a program's function; gives its exit code, 0 for none.

    A `UserError`, or a bucket that refuses, becomes the line `error: ...` on stderr and code 2,
    Ctrl-C a line and code 130.

    Args:
      interrupted: what is said after Ctrl-C.
      is_silent: another process says what is wrong.
    """
    try:
        return function(*arguments) or 0
    except UserError as error:
        if not is_silent:
            sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return EXIT_USER_ERROR
    except OSError as error:
        if not _is_of_storage(error):
            raise
        if not is_silent:
            hint = "look at the bucket's name, your login and its rights"
            sys.stderr.write(f"error: {' '.join(str(error).split())}; {hint}\n")
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        sys.stderr.write(f"{interrupted}\n")
        return EXIT_INTERRUPTED


@contextlib.contextmanager
def pause_collection() -> Iterator[None]:
    """Nothing looks for cycles of garbage meanwhile.

    Imports make hundreds of thousands of objects that stay, and Python would go through all of
    them time and again: a seventh of a run's start.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _is_of_storage(error: OSError) -> bool:
    """Whether a store has refused; only who has loaded its room can have met that."""
    room = sys.modules.get("utils.storage.folder")
    return room is not None and isinstance(error, room.StorageError)


def prepare_folder(folder: Path | None, flag: str) -> None:
    """Make a directory for results before time is spent on them; none: nothing to do.

    Raises:
      UserError: it cannot be made.
    """
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{flag} ({str(folder)!r}) cannot be made: {error.strerror}; give another place"
        ) from error


def prepare_picture(path: Path | None, flag: str) -> None:
    """The same for a file of a picture.

    Raises:
      UserError: as of `prepare_file`, or its ending says no format.
    """
    if path is not None and path.suffix not in _PICTURES:
        raise UserError(
            f"{flag} ({str(path)!r}) must end with one of {', '.join(_PICTURES)}; rename it"
        )
    prepare_file(path, flag)


def prepare_file(path: Path | None, flag: str) -> None:
    """The same for a file: its directory is made.

    Raises:
      UserError: it cannot be made or written to, or the file is a directory.
    """
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"{flag} ({str(path)!r}) is a directory; name a file in it")
    prepare_folder(path.parent, flag)
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise UserError(
            f"{flag} ({str(path)!r}) cannot be written: {error.strerror}; give another place"
        ) from error
