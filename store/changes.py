"""What of a configuration may differ between a run's start and its continuation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from utils.errors import UserError

# Keys that leave the course of the run alone, or that a person changes on purpose. A teacher's
# weights may have moved: their content is compared, not their path.
MAY_CHANGE = (
    "run.*", "runtime.*", "profile.*", "data.root", "data.threads", "data.prefetch_batches",
    "data.shuffle_gib", "data.return_id", "data.skip_corrupt", "data.eval_batch_size",
    "data.test_split", "train.epochs", "train.steps", "train.log_every_steps",
    "train.eval_every_epochs", "train.checkpoint_every_epochs", "train.checkpoint_every_steps",
    "train.keep_checkpoints", "train.keep_every_steps", "train.on_nonfinite",
    "train.max_rollbacks", "train.stall_timeout_s", "train.deterministic", "train.remat",
    "train.scan_layers",
    "model.weights", "model.pretrained", "distill.teacher_weights", "distill.allow_weak_teacher",
)  # fmt: skip
# Of these a change is reported, because bits may then differ.
NOT_EXACT = ("runtime.*", "train.epochs", "train.steps", "train.deterministic", "train.remat",
             "train.scan_layers")  # fmt: skip


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """`section.key` -> value of a dumped configuration."""
    return {
        f"{section}.{key}": value
        for section, values in config.items()
        if isinstance(values, Mapping)
        for key, value in values.items()
    }


def hash_config(config: Mapping[str, Any]) -> str:
    """A hash of what must not change between start and continuation."""
    fixed = {k: v for k, v in flatten(config).items() if not _matches(k, MAY_CHANGE)}
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:16]


def find_changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys whose values differ, with both values; a key that one side does not know is left out.

    A newer program knows more keys than the one that began the run.
    """
    old, new = flatten(then), flatten(json.loads(json.dumps(now)))
    return {
        key: (old[key], new[key]) for key in sorted(old.keys() & new.keys()) if old[key] != new[key]
    }


def check_changes(
    then: Mapping[str, Any], now: Mapping[str, Any], allowed: Iterable[str]
) -> list[str]:
    """Refuse a continuation whose configuration would make it another run.

    Args:
      then: the configuration that the checkpoint was written under, as a dictionary.
      now: this run's.
      allowed: further keys that may change, by name or pattern.

    Returns:
      A line for each change that is allowed and may change bits.

    Raises:
      UserError: other keys have changed; all of them are named with both values.
    """
    changes = find_changes(then, now)
    allowed = (*MAY_CHANGE, *allowed)
    refused = {key: both for key, both in changes.items() if not _matches(key, allowed)}
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
        if not _matches(key, MAY_CHANGE) or _matches(key, NOT_EXACT)
    ]


def check_stream(
    then: Mapping[str, Any], now: Mapping[str, Any], allowed: Iterable[str], *, mid_epoch: bool
) -> list[str]:
    """Refuse a continuation that would show other examples than the run's epoch has left.

    Args:
      then: `describe_stream` when the checkpoint was written.
      now: the same of this run.
      allowed: keys that may change, by name or pattern.
      mid_epoch: whether part of an epoch has been consumed.

    Returns:
      A line for each change that is no reason to stop.

    Raises:
      UserError: other examples, or in mid-epoch another order of them.
    """
    order, window = ("data.order", "order"), ("data.shuffle_gib", "shuffle_gib")
    old, new = then["dataset"], now["dataset"]
    rows = [("data.name", "version", old[2], new[2], True)]
    rows += [("data.train_split", "examples", old[-1], new[-1], True)]
    rows += [(key, name, then[name], now[name], mid_epoch) for key, name in (order, window)]
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


def _matches(key: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
