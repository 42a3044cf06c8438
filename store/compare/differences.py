"""Differences between runs: configuration, environment, commits and patches of their source."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from store.compare.sides import SEED, Side
from store.query.config_text import flatten_config
from store.query.record import RunRecord
from store.record.source import split_diff
from utils.json_types import JsonObject

# A run's own name is no difference.
_NAMES = ("run.run_id",)
MISSING = "(not there)"
_MOST_VALUES = 4


@dataclass(frozen=True)
class Difference:
    """A key that differs: its values on each side, and whether it can change what is learnt."""

    key: str
    values: tuple[str, ...]
    matters: bool


@dataclass(frozen=True)
class SourceDifference:
    """The source of two runs."""

    # base, new: the runs
    base: str
    new: str
    commits: tuple[str, str]  # of both; empty if unknown
    patches: tuple[str, str]  # state of each patch: none, whole, too large, secret, unknown
    files: tuple[str, ...]  # whose parts of the patches differ
    diff: str  # that difference, as a unified diff of the two patches

    @property
    def is_known(self) -> bool:
        """Whether both commits and both patches are known."""
        return all(self.commits) and all(patch in ("none", "whole") for patch in self.patches)

    @property
    def is_same(self) -> bool:
        """Whether both were certainly started from the same source."""
        return self.is_known and self.commits[0] == self.commits[1] and not self.files


def find_differences(sides: Collection[Side], ignored: Collection[str]) -> list[Difference]:
    """Find keys of the configuration that differ, those that matter (not `ignored`) first."""
    columns = [[record.config for record in side.records] for side in sides]
    differences = _find(columns, ignored, _NAMES)
    return sorted(differences, key=lambda row: (not row.matters, row.key))


def find_environment(sides: Collection[Side]) -> list[Difference]:
    """Find what differs in versions, machine and commit; the commit comes first."""
    records = [record for side in sides for record in side.records]
    # If one run records little, everything that another one records would seem to differ.
    has_details = all(record.environment for record in records)
    columns = []
    for side in sides:
        columns.append([read_environment_of(record) for record in side.records])
        if has_details:
            for record, row in zip(side.records, columns[-1], strict=True):
                details = {k: record.environment.get(k) for k in ("os", "packages", "variables")}
                row |= flatten_config(details)
    return sorted(_find(columns, (), ()), key=lambda row: (row.key != "git_commit", row.key))


def read_environment_of(record: RunRecord) -> JsonObject:
    """Return the environment of a run's `run.json` by dotted keys."""
    return flatten_config(record.facts.environment)


def compare_sources(base: RunRecord, new: RunRecord) -> SourceDifference:
    """Compare the source from which the newest attempts of two runs were started."""
    first, second = (record.environment.get("source", {}) for record in (base, new))
    old, now = split_diff(base.patch), split_diff(new.patch)
    files = sorted(name for name in old.keys() | now if old.get(name) != now.get(name))
    diff = ""
    for name in files:
        texts = (old.get(name, "").splitlines(), now.get(name, "").splitlines())
        lines = difflib.unified_diff(*texts, f"base: {name}", f"new: {name}", lineterm="")
        diff += "".join(f"{line}\n" for line in lines)
    commits = (str(first.get("commit", "")), str(second.get("commit", "")))
    patches = (str(first.get("diff", "unknown")), str(second.get("diff", "unknown")))
    return SourceDifference(base.path, new.path, commits, patches, tuple(files), diff)


def _find(
    columns: list[list[JsonObject]], ignored: Collection[str], left_out: Iterable[str]
) -> list[Difference]:
    keys = {key for column in columns for config in column for key in config} - set(left_out)
    differences = []
    for key in sorted(keys):
        texts = [[_show(config, key) for config in column] for column in columns]
        if len({text for column in texts for text in column}) > 1:
            # Seeds differ within a side on purpose.
            if key == SEED and len({tuple(sorted(column)) for column in texts}) == 1:
                continue
            values = []
            for column in texts:
                unique = list(dict.fromkeys(column))
                rest = len(unique) - _MOST_VALUES
                more = f", {rest} more" if rest > 0 else ""
                values.append(", ".join(unique[:_MOST_VALUES]) + more)
            differences.append(Difference(key, tuple(values), key not in ignored))
    return differences


def _show(config: JsonObject, key: str) -> str:
    if key not in config:
        return MISSING
    value = config[key]
    return value if isinstance(value, str) and value else json.dumps(value, default=str)
