"""Compares the configuration of a run's start with that of its continuation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from utils.errors import UserError
from utils.json_types import JsonMapping, JsonObject, JsonValue

# Key -> rule for another value in a continuation: free, warns, between_epochs or refused. A key
# without a rule is refused.
Rules = Mapping[str, str]


def flatten(config: JsonMapping) -> JsonObject:
    """Return `section.key` -> value of a dumped configuration."""
    return {
        f"{section}.{key}": value
        for section, values in config.items()
        if isinstance(values, Mapping)
        for key, value in values.items()
    }


def hash_config(config: JsonMapping, rules: Rules) -> str:
    """Hash the keys that must not change between start and continuation."""
    flat = flatten(config).items()
    fixed = {key: value for key, value in flat if rules.get(key, "refused") == "refused"}
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:16]


def find_changes(then: JsonMapping, now: JsonMapping) -> dict[str, tuple[JsonValue, JsonValue]]:
    """Return the keys with different values on both sides; newer programs have further keys."""
    old, new = flatten(then), flatten(json.loads(json.dumps(now)))
    shared = sorted(old.keys() & new.keys())
    return {key: (old[key], new[key]) for key in shared if _differ(old[key], new[key])}


def _differ(old: JsonValue, new: JsonValue) -> bool:
    sections = isinstance(old, list) and isinstance(new, list) and len(old) == len(new)
    if sections and all(isinstance(item, Mapping) for item in (*old, *new)):
        pairs = zip(old, new, strict=True)
        return any(a[key] != b[key] for a, b in pairs for key in a.keys() & b.keys())
    return old != new


def check_changes(
    then: JsonMapping, now: JsonMapping, allowed: Iterable[str], rules: Rules
) -> list[str]:
    """Refuse a continuation whose configuration would make it another run.

    Args:
      then: the dumped configuration of the checkpoint; `now`: that of this run.
      allowed: further keys that may change, by name or pattern.

    Returns:
      A line for each change that is allowed and may change bits.

    Raises:
      UserError: other keys have changed; all of them are named with both values.
    """
    changes = find_changes(then, now)
    fixed = {key: both for key, both in changes.items() if rules.get(key, "refused") == "refused"}
    refused = {key: both for key, both in fixed.items() if not _matches(key, allowed)}
    if refused:
        words = "; ".join(f"{k} was {_show(a)}, is {_show(b)}" for k, (a, b) in refused.items())
        keys = ",".join(f'"{key}"' for key in refused)
        raise UserError(
            f"run.resume: the configuration has changed since the checkpoint was written: {words}; "
            f"resume with the first values, or allow it by --run.allow_changes='[{keys}]'",
            code="resume.changed_key",
        )
    return [
        f"{key} was {_show(old)}, is {_show(new)}"
        for key, (old, new) in changes.items()
        if key in fixed or rules[key] == "warns"
    ]


def check_stream(
    then: JsonMapping, now: JsonMapping, allowed: Iterable[str], rules: Rules, *, mid_epoch: bool
) -> list[str]:
    """Refuse a continuation that would use other examples than the rest of the run's epoch.

    Args:
      then: `describe_stream` when the checkpoint was written; `now`: the same of this run.
      allowed: keys that may change, by name or pattern.
      rules: keys that may change between epochs are in the description by their last word.
      mid_epoch: whether part of an epoch has been consumed.

    Returns:
      A line for each change that is allowed.

    Raises:
      UserError: other examples, or another order of them within an epoch.
    """
    old, new = then["dataset"], now["dataset"]
    rows = [("data.name", "version", old[2], new[2], True)]
    rows += [("data.train_split", "examples", old[-1], new[-1], True)]
    # The order in the description is the actual one: data.order may be auto.
    keys = ["data.order", *(key for key, rule in rules.items() if rule == "between_epochs")]
    names = [(key, key.rpartition(".")[2]) for key in keys]
    rows += [(key, name, then[name], now[name], mid_epoch) for key, name in names if name in then]
    modules = _check_modules(then.get("imports", {}), now.get("imports", {}), allowed)
    lines = []
    for key, name, old, new, refused in rows:
        # If the order itself has changed, its window is irrelevant.
        if old == new or (name == "shuffle_gib" and then["order"] != now["order"]):
            continue
        words = f"{key}: {name} was {_show(old)}, is {_show(new)}"
        if refused and not _matches(key, allowed):
            reason = "the run would continue with another permutation"
            if mid_epoch:
                reason = "examples of this epoch would be repeated or missing"
            raise UserError(
                f"run.resume: {words} since the checkpoint was written, so {reason}; resume with "
                f"the first data and value, or allow it by --run.allow_changes='[\"{key}\"]'",
                code="resume.changed_key",
            )
        lines.append(words)
    if not lines and then["dataset_files"] != now["dataset_files"]:
        lines.append("data.train_split: the files differ from those at the run's start")
    return modules + lines


def _check_modules(then: JsonMapping, now: JsonMapping, allowed: Iterable[str]) -> list[str]:
    """Refuse other code of own modules: name -> hash; return a line for each that may differ."""
    words = [
        f"run.imports: the code of {name} was {_show(then.get(name))}, is {_show(now.get(name))}"
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name)
    ]
    if words and not _matches("run.imports", allowed):
        raise UserError(
            f"run.resume: {'; '.join(words)} since the checkpoint was written, so it would be "
            "another run; resume with the first code, or allow it by "
            """--run.allow_changes='["run.imports"]'"""
        )
    return words


def _matches(key: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def _show(value: JsonValue) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
