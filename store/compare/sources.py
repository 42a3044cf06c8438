"""What two runs were started from: commits, and how the patches that lay on them differ."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from store.query.record import RunRecord
from store.record.source import split_diff


@dataclass(frozen=True)
class SourceDifference:
    """The source of two runs.

    Attributes:
      base, new: the runs.
      commits: of both; empty: unknown.
      patches: what is known of each patch: none, whole, too large, secret, unknown.
      files: whose part of the patches is not the same.
      diff: that difference, as a unified diff of the two patches.
    """

    base: str
    new: str
    commits: tuple[str, str]
    patches: tuple[str, str]
    files: tuple[str, ...]
    diff: str

    @property
    def is_known(self) -> bool:
        """Whether both commits and both patches are known."""
        return all(self.commits) and all(one in ("none", "whole") for one in self.patches)

    @property
    def is_same(self) -> bool:
        """Whether both were certainly started from the same source."""
        return self.is_known and self.commits[0] == self.commits[1] and not self.files


def compare_sources(base: RunRecord, new: RunRecord) -> SourceDifference:
    """The source that the newest attempts of two runs were started from."""
    told = [record.environment.get("source", {}) for record in (base, new)]
    parts = [split_diff(record.patch) for record in (base, new)]
    names = parts[0].keys() | parts[1].keys()
    files = sorted(name for name in names if parts[0].get(name) != parts[1].get(name))
    diff = "".join(_diff(name, parts[0].get(name, ""), parts[1].get(name, "")) for name in files)
    commits = tuple(str(one.get("commit", "")) for one in told)
    patches = tuple(str(one.get("diff", "unknown")) for one in told)
    return SourceDifference(base.path, new.path, commits, patches, tuple(files), diff)


def _diff(name: str, base: str, new: str) -> str:
    """How the patches to one file differ."""
    lines = difflib.unified_diff(
        base.splitlines(), new.splitlines(), f"base: {name}", f"new: {name}", lineterm=""
    )
    return "".join(f"{line}\n" for line in lines)
