"""What was set otherwise: configuration, environment and source of runs, only where they differ."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from store.compare.sides import SEED, Side
from store.query.config_text import flatten_config
from store.query.record import RunRecord
from utils.json_types import JsonObject, JsonValue

# The name of a run tells itself.
_NAMES = ("run.run_id",)
MISSING = "(not there)"
_MOST_VALUES = 4


@dataclass(frozen=True)
class Difference:
    """A key that is not the same on all sides.

    Attributes:
      key: of the configuration or the environment.
      values: of each side; where its runs differ, all of them.
      matters: whether it can change what is learnt.
    """

    key: str
    values: tuple[str, ...]
    matters: bool


def find_differences(sides: Collection[Side], ignored: Collection[str]) -> list[Difference]:
    """Keys of the configuration that differ, those that matter first, by section.

    Args:
      ignored: keys that cannot change what is learnt.
    """
    columns = [[record.config for record in side.records] for side in sides]
    found = _find(columns, ignored, _NAMES)
    return sorted(found, key=lambda one: (not one.matters, one.key))


def find_environment(sides: Collection[Side]) -> list[Difference]:
    """What differs in versions, machine and commit; the commit comes first."""
    records = [record for side in sides for record in side.records]
    # Next to a run that tells little, all that another one tells would seem to differ.
    read = _read_at_length if all(one.environment for one in records) else read_environment_of
    columns = [[read(record) for record in side.records] for side in sides]
    found = _find(columns, (), ())
    return sorted(found, key=lambda one: (one.key != "git_commit", one.key))


def read_environment_of(record: RunRecord) -> JsonObject:
    """Where a run ran, by dotted keys."""
    environment = record.facts.get("environment")
    return flatten_config(environment) if isinstance(environment, dict) else {}


def _read_at_length(record: RunRecord) -> JsonObject:
    """All that a run tells of where it ran, by dotted keys."""
    told = {key: record.environment.get(key) for key in ("os", "packages", "variables")}
    return {**read_environment_of(record), **flatten_config(told)}


def _find(
    columns: list[list[JsonObject]], ignored: Collection[str], left_out: Iterable[str]
) -> list[Difference]:
    keys = {key for column in columns for config in column for key in config} - set(left_out)
    found = []
    for key in sorted(keys):
        texts = [[_show(config, key) for config in column] for column in columns]
        if len({text for column in texts for text in column}) > 1:
            # Seeds differ within a side as they should.
            if key == SEED and len({tuple(sorted(column)) for column in texts}) == 1:
                continue
            values = tuple(_join(column) for column in texts)
            found.append(Difference(key, values, key not in ignored))
    return found


def _show(config: JsonObject, key: str) -> str:
    if key not in config:
        return MISSING
    value: JsonValue = config[key]
    return value if isinstance(value, str) and value else json.dumps(value, default=str)


def _join(texts: list[str]) -> str:
    different = list(dict.fromkeys(texts))
    more = f", {len(different) - _MOST_VALUES} more" if len(different) > _MOST_VALUES else ""
    return ", ".join(different[:_MOST_VALUES]) + more
