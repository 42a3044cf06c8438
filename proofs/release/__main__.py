"""Releases: `python -m proofs.release COMMAND ...`, in a clone with its whole history.

    python -m proofs.release notes --store runs
    python -m proofs.release fixture 0.2.0
    python -m proofs.release check 0.2.0
    python -m proofs.release bump 0.2.0

`notes` prints what has changed since the last release; `--write` puts it into CHANGELOG.md as the
section of VERSION. `fixture` makes the files of a version that every later one must open. `check`
prints what stands in the way of a release, and ends with exit code 1 if anything does. `bump` runs
it, then writes VERSION, CHANGELOG.md and CITATION.cff; you commit and tag them. Releases are found
by tags, or in a clone without tags by the headings of CHANGELOG.md.
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
from collections.abc import Callable
from pathlib import Path

from proofs.release.changelog import format_first_section, format_section, insert_section
from proofs.release.changes import compare_facts, read_changes, read_formats
from proofs.release.checks import CITATION, VERSION_FILE, find_faults, read_version
from proofs.release.fixture import make_fixture
from proofs.release.history import CHANGELOG, History, Release, open_history, parse_version
from store.quality.trends import Trend, find_trends, read_reports
from utils.errors import EXIT_FAILED, UserError
from utils.programs import CommandLine, ProgramParser, create_program_parser

ROOT = Path(__file__).resolve().parents[2]
_TO_COMMIT = f"{VERSION_FILE} {CHANGELOG} {CITATION}"


def create_parser() -> ProgramParser:
    """Create the parser, with one parser for each command."""
    parser = create_program_parser(__doc__, prog="python -m proofs.release")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout (this one)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    store = "a store of benchmark reports, whose trends since the last release are named"

    def add(run: Callable[[argparse.Namespace], int], text: str) -> ProgramParser:
        name = run.__name__.removeprefix("_")
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        command.set_defaults(run=run)
        return command

    command = add(_check, "print what stands in the way of a release")
    command.add_argument("version", nargs="?", default="", help="to release (default: VERSION)")
    command = add(_notes, "print what has changed since the last release")
    command.add_argument("--store", default="", metavar="DIR", help=store)
    command.add_argument("--write", action="store_true", help=f"into {CHANGELOG}, for VERSION")
    command = add(_bump, "check, then write the version and its notes")
    command.add_argument("version", help="the next one, higher than VERSION")
    command.add_argument("--store", default="", metavar="DIR", help=store)
    command = add(_fixture, "make the files of a version that later ones must open")
    command.add_argument("version", help="that will be released")
    return parser


def _check(options: argparse.Namespace) -> int:
    history = open_history(options.root)
    version = options.version or read_version(options.root)
    parse_version(version)
    return _print_faults(history, version)


def _notes(options: argparse.Namespace) -> int:
    history = open_history(options.root)
    version = read_version(options.root)
    if not options.write:
        releases = history.list_releases()
        name = "Unreleased" if version in {release.version for release in releases} else version
        print(_make_section(history, name, "", options.store), end="")
        return 0
    if history.has_tag(version):
        raise UserError(f"version {version} has a tag: its notes stay; bump to a higher version")
    section = _make_section(history, version, _read_date(), options.store)
    path = options.root / CHANGELOG
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    path.write_text(insert_section(text, version, section), encoding="utf-8")
    print(f"{path}: {version}")
    return 0


def _bump(options: argparse.Namespace) -> int:
    history = open_history(options.root)
    version, current = options.version, read_version(options.root)
    released = [current, *(release.version for release in history.list_releases())]
    highest = max(released, key=parse_version)
    if parse_version(version) <= parse_version(highest):
        raise UserError(f"version {version!r} must be higher than {highest}; give a higher one")
    if _print_faults(history, version):
        return EXIT_FAILED
    date = _read_date()
    section = _make_section(history, version, date, options.store)
    changelog = insert_section(
        (options.root / CHANGELOG).read_text(encoding="utf-8"), version, section
    )
    citation = (options.root / CITATION).read_text(encoding="utf-8")
    for key, value in {"version": version, "date-released": date}.items():
        citation = re.sub(rf"^{key}: .*$", f"{key}: {value}", citation, flags=re.MULTILINE)
    texts = {CHANGELOG: changelog, CITATION: citation, VERSION_FILE: f"{version}\n"}
    for name, text in texts.items():
        (options.root / name).write_text(text, encoding="utf-8")
    print(f"now: git commit -m 'chore(release): release {version}' {_TO_COMMIT}")
    print(f"     git tag v{version}")
    return 0


def _fixture(options: argparse.Namespace) -> int:
    parse_version(options.version)
    print(make_fixture(options.root, options.version))
    return 0


def _print_faults(history: History, version: str) -> int:
    faults = find_faults(history, version)
    for name, texts in faults.items():
        print(f"{name}: {'fit' if not texts else '; '.join(texts)}")
    return EXIT_FAILED if any(faults.values()) else 0


def _make_section(history: History, version: str, date: str, store: str) -> str:
    """Make a section of what has changed since the release before the given one."""
    older = [release for release in history.list_releases() if release.version != version]
    before: Release | None = older[-1] if older else None
    commits = history.read_commits(before)
    if before is None:
        formats = compare_facts({}, read_formats(history, "HEAD"))
        return format_first_section(version, date, commits, formats)
    changes = read_changes(history, before.revision)
    began = history.run_git("log", "-1", "--format=%cs", before.revision).strip()
    return format_section(version, date, commits, changes, _read_trends(store, began))


def _read_trends(store: str, began: str) -> list[Trend]:
    """Read the trends of the series that have a report since a day; empty without a store."""
    if not store:
        return []
    series = {
        name: reports
        for name, reports in read_reports(store).items()
        if str(reports[-1].get("created") or reports[-1].get("made") or "") >= began
    }
    trends = [trend for name, reports in series.items() for trend in find_trends(name, reports)]
    return [trend for trend in trends if trend.verdict != "too few"]


def _read_date() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


main = CommandLine(create_parser)

if __name__ == "__main__":
    sys.exit(main())
