"""The history of a checkout as git keeps it: releases, commits, and files as they were."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from utils.errors import UserError

CHANGELOG = "CHANGELOG.md"
TYPES = ("feat", "fix", "refactor", "style", "test", "docs", "perf", "chore", "build", "revert")
Version = tuple[int, int, int]
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")
_HEADING = re.compile(r"^## \[(\d+\.\d+\.\d+)\]", re.MULTILINE)
_SUBJECT = re.compile(rf"({'|'.join(TYPES)})(?:\(([a-z0-9_]+(?:,[a-z0-9_]+)*)\))?: (\S.*)")


@dataclass(frozen=True)
class Commit:
    """One commit whose subject is `type(scope,scope): text`."""

    revision: str
    kind: str  # one of `TYPES`
    scopes: tuple[str, ...]  # empty if it names none
    text: str


@dataclass(frozen=True)
class Release:
    """A released version and the commit that it is."""

    version: str
    revision: str


@dataclass(frozen=True)
class History:
    """The history of the checkout at `root`."""

    root: Path

    def run_git(self, *arguments: str) -> str:
        """Return what a git command prints; UserError if it fails."""
        done = subprocess.run(
            ["git", "-C", str(self.root), *arguments], capture_output=True, text=True
        )
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise UserError(f"git {arguments[0]} failed: {reason}; mend the checkout")
        return done.stdout

    def list_releases(self) -> list[Release]:
        """List the releases, the oldest first.

        A release is a tag such as v0.1.0. A clone without tags has the versions that CHANGELOG.md
        names in HEAD, each at the commit that has added its heading.
        """
        tags = [tag for tag in self.run_git("tag", "--merged", "HEAD").split() if tag[:1] == "v"]
        versions = {tag[1:]: tag for tag in tags if _VERSION.fullmatch(tag[1:])}
        for version in list_versions(self.read_file("HEAD", CHANGELOG)):
            if version not in versions:
                heading = f"## [{version}]"
                added = self.run_git("log", f"-S{heading}", "--format=%H", "--", CHANGELOG)
                versions[version] = added.split()[-1]
        return [Release(name, versions[name]) for name in sorted(versions, key=parse_version)]

    def has_tag(self, version: str) -> bool:
        """Return whether this clone has the version's tag."""
        return bool(self.run_git("tag", "--list", f"v{version}").strip())

    def read_commits(self, since: Release | None) -> list[Commit]:
        """Read the commits after a release, or all of them, the newest first.

        Raises:
          UserError: a subject has an unknown type, or a scope that is no word.
        """
        commits = []
        for line in self._log(since):
            revision, _, subject = line.partition(" ")
            match = _SUBJECT.fullmatch(subject)
            if match is None:
                raise UserError(
                    f"commit {revision[:12]} ({subject!r}) is not `type(scope): text` with a type "
                    f"of {', '.join(TYPES)}; reword it before the release"
                )
            scopes = tuple(match[2].split(",")) if match[2] else ()
            commits.append(Commit(revision, match[1], scopes, match[3]))
        return commits

    def read_file(self, revision: str, path: str) -> str:
        """Read a file as it was at a revision; empty if it did not exist."""
        if not self.list_files(revision, path):
            return ""
        return self.run_git("show", f"{revision}:{path}")

    def list_files(self, revision: str, *paths: str) -> list[str]:
        """List the files of a revision below the given paths."""
        command = ("ls-tree", "-r", "--name-only", "--full-tree", revision, "--", *paths)
        return self.run_git(*command).splitlines()

    def list_changes(self) -> list[str]:
        """List the files that differ from HEAD, new ones among them."""
        lines = self.run_git("status", "--porcelain", "--untracked-files=normal").splitlines()
        return [line[3:] for line in lines]

    def _log(self, since: Release | None) -> list[str]:
        span = f"{since.revision}..HEAD" if since else "HEAD"
        return self.run_git("log", "--no-merges", "--format=%H %s", span).splitlines()


def open_history(root: Path) -> History:
    """Open the history of a checkout.

    Raises:
      UserError: there is no git, the source tree has no .git, or the clone is shallow.
    """
    history = History(root)
    way_out = "releases are made in a clone of the repository with its whole history"
    if not (root / ".git").exists():
        raise UserError(f"{str(root)!r} has no .git; {way_out}")
    try:
        shallow = history.run_git("rev-parse", "--is-shallow-repository").strip()
    except OSError as error:
        raise UserError(f"git cannot be started ({error}); install it") from error
    if shallow == "true":
        raise UserError(
            f"{str(root)!r} is a shallow clone; {way_out}: git fetch --unshallow --tags"
        )
    return history


def parse_version(text: str) -> Version:
    """Parse `0.1.0`; UserError for anything else."""
    match = _VERSION.fullmatch(text)
    if match is None:
        raise UserError(f"version {text!r} is not MAJOR.MINOR.PATCH; give one such as 0.1.0")
    return int(match[1]), int(match[2]), int(match[3])


def list_versions(changelog: str) -> list[str]:
    """List the versions that a changelog has a section of, in its order."""
    return _HEADING.findall(changelog)
