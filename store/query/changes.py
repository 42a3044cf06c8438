"""Compares the configuration of a run's start with that of its continuation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from utils.errors import UserError
from utils.json_types import JsonMapping, JsonObject, JsonValue

# Key -> what its own field says of another value in a continuation: free, warns, between_epochs or
# refused. A key without a rule is refused.
Rules = Mapping[str, str]


def flatten(config: JsonMapping) -> JsonObject:
    """`section.key` -> value of a dumped configuration."""
    return {
        f"{section}.{key}": value
        for section, values in config.items()
        if isinstance(values, Mapping)
        for key, value in values.items()
    }


def hash_config(config: JsonMapping, rules: Rules) -> str:
    """A hash of what must not change between start and continuation."""
    fixed = {key: value for key, value in flatten(config).items() if _is_refused(key, rules)}
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:16]


def find_changes(then: JsonMapping, now: JsonMapping) -> dict[str, tuple[JsonValue, JsonValue]]:
    """Keys whose values differ, with both values; a key that one side does not know is left out.

    A newer program knows more keys than the one that began the run, in the sections of a list, too.
    """
    old, new = flatten(then), flatten(json.loads(json.dumps(now)))
    shared = sorted(old.keys() & new.keys())
    return {key: (old[key], new[key]) for key in shared if _differ(old[key], new[key])}


def _differ(old: JsonValue, new: JsonValue) -> bool:
    sections = isinstance(old, list) and isinstance(new, list) and len(old) == len(new)
    if sections and all(isinstance(one, Mapping) for one in (*old, *new)):
        pairs = zip(old, new, strict=True)
        return any(one[key] != two[key] for one, two in pairs for key in one.keys() & two.keys())
    return old != new


def check_changes(
    then: JsonMapping, now: JsonMapping, allowed: Iterable[str], rules: Rules
) -> list[str]:
    """Refuse a continuation whose configuration would make it another run.

    Args:
      then: the configuration that the checkpoint was written under, as a dictionary.
      now: this run's.
      allowed: further keys that may change, by name or pattern.
      rules: of all keys.

    Returns:
      A line for each change that is allowed and may change bits.

    Raises:
      UserError: other keys have changed; all of them are named with both values.
    """
    changes = find_changes(then, now)
    fixed = {key: both for key, both in changes.items() if _is_refused(key, rules)}
    refused = {key: both for key, both in fixed.items() if not _matches(key, allowed)}
    if refused:
        words = "; ".join(f"{k} was {_show(a)}, is {_show(b)}" for k, (a, b) in refused.items())
        keys = ",".join(f'"{key}"' for key in refused)
        raise UserError(
            f"run.resume: the configuration has changed since the checkpoint was written: {words}; "
            f"resume with the first values, or allow it by --run.allow_changes='[{keys}]'"
        )
    return [
        f"{key} was {_show(old)}, is {_show(new)}"
        for key, (old, new) in changes.items()
        if key in fixed or rules[key] == "warns"
    ]


def check_stream(
    then: JsonMapping,
    now: JsonMapping,
    allowed: Iterable[str],
    rules: Rules,
    *,
    mid_epoch: bool,
) -> list[str]:
    """Refuse a continuation that would show other examples than the run's epoch has left.

    Args:
      then: `describe_stream` when the checkpoint was written.
      now: the same of this run.
      allowed: keys that may change, by name or pattern.
      rules: of all keys; those that may change between epochs stand in the description by their
        last word.
      mid_epoch: whether part of an epoch has been consumed.

    Returns:
      A line for each change that is no reason to stop.

    Raises:
      UserError: other examples, or in mid-epoch another order of them.
    """
    old, new = then["dataset"], now["dataset"]
    rows = [("data.name", "version", old[2], new[2], True)]
    rows += [("data.train_split", "examples", old[-1], new[-1], True)]
    # The order is the one that was found: data.order may say auto.
    keys = ["data.order", *(key for key, rule in rules.items() if rule == "between_epochs")]
    names = [(key, key.rpartition(".")[2]) for key in keys]
    rows += [(key, name, then[name], now[name], mid_epoch) for key, name in names if name in then]
    lines = []
    for key, name, old, new, refused in rows:
        # Where the order itself has changed its window says nothing.
        if old == new or (name == "shuffle_gib" and then["order"] != now["order"]):
            continue
        words = f"{key}: {name} was {_show(old)}, is {_show(new)}"
        if refused and not _matches(key, allowed):
            reason = "another permutation would go on under this run's name"
            if mid_epoch:
                reason = "examples of this epoch would come twice or never"
            raise UserError(
                f"run.resume: {words} since the checkpoint was written, so {reason}; resume with "
                f"the first data and value, or allow it by --run.allow_changes='[\"{key}\"]'"
            )
        lines.append(words)
    if not lines and then["dataset_files"] != now["dataset_files"]:
        lines.append("data.train_split: the files are not those of the run's start")
    return lines


def _is_refused(key: str, rules: Rules) -> bool:
    return rules.get(key, "refused") == "refused"


def _matches(key: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def _show(value: JsonValue) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
