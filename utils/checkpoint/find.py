"""Finds the checkpoint behind a path: the newest whole one; broken ones are skipped."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from utils.checkpoint.files import (
    STATE_FILE,
    CheckpointError,
    CheckpointFacts,
    Location,
    Tensors,
    inspect_checkpoint,
    load_checkpoint,
    verify_checkpoint,
)
from utils.errors import UserError
from utils.log import get_logger
from utils.storage.folder import Folder
from utils.storage.local import LocalFolder, get_old_name
from utils.storage.places import open_folder

_STEP = re.compile(r"step_(\d{8})")


def get_folder_name(step: int) -> str:
    """Return the folder name of a step, such as `step_00001000`."""
    return f"step_{step:08d}"


def list_steps(folder: Folder) -> list[int]:
    """Return the steps of folders, ascending: whole on a disk, perhaps not on a store."""
    return sorted(int(m[1]) for m in map(_STEP.fullmatch, folder.list_names()) if m)


def find_checkpoint(location: Location, *, verify: bool = True) -> Location:
    """Find the checkpoint of a path, or the newest of a run; `verify` reads its tensors, too."""
    check = verify_checkpoint if verify else inspect_checkpoint
    for folder in iterate_checkpoints(location):
        try:
            check(folder)
        except CheckpointError as error:
            get_logger().warning("skipping a broken checkpoint: %s", error)
        else:
            return _get_location(folder)
    raise UserError(
        f"run.resume ({str(location)!r}): no whole checkpoint there; use a run's directory or a "
        "step_... directory"
    )


def load_newest(
    location: Location, *, fall_back: bool = True
) -> tuple[Location, Tensors, CheckpointFacts]:
    """Load a checkpoint, or the newest whole older one if `fall_back`; else a CheckpointError."""
    first = open_folder(location)
    failure: CheckpointError | None = None
    for folder in (first, *(_iterate_older(first) if fall_back else ())):
        try:
            parts, facts = load_checkpoint(folder)
        except CheckpointError as error:
            get_logger().warning("skipping a broken checkpoint: %s", error)
            failure = failure or error
        else:
            return _get_location(folder), parts, facts
    assert failure is not None
    raise failure


def has_checkpoints(location: Location) -> bool:
    """Return whether a run or `checkpoints/` has any finished checkpoint, broken or not."""
    return next(iterate_checkpoints(location), None) is not None


def iterate_checkpoints(location: Location) -> Iterator[Folder]:
    """Yield the checkpoint of a path, or those of a run or `checkpoints/`, newest first."""
    folder = open_folder(location)
    if STATE_FILE in folder.list_names() or _STEP.fullmatch(folder.name):
        yield folder
        return
    for parent in (folder.child("checkpoints"), folder):
        yield from _iterate_folder(parent)


def read_best_step(folder: Folder) -> int | None:
    """Read the step of the best checkpoint; None without best.json, an error if it is broken."""
    try:
        step = json.loads(folder.read_text("best.json"))["step"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}/best.json cannot be read: {error}") from error
    if not isinstance(step, int):
        raise CheckpointError(f"{folder}/best.json has no step")
    return step


def _iterate_folder(folder: Folder) -> Iterator[Folder]:
    """Yield the checkpoints of a folder, newest first, including one that was being replaced."""
    names = set(folder.list_names())
    steps = {name: int(m[1]) for name in names if (m := _STEP.fullmatch(name))}
    for name in names:
        whole_name = name.removeprefix(get_old_name(""))
        match = _STEP.fullmatch(whole_name)
        if match and whole_name not in names:
            steps[name] = int(match[1])
    for name in sorted(steps, key=lambda name: steps[name], reverse=True):
        yield folder.child(name)


def _iterate_older(first: Folder) -> Iterator[Folder]:
    match = _STEP.search(first.name)
    if match is None:
        return
    for folder in _iterate_folder(first.parent):
        other = _STEP.search(folder.name)
        if other is not None and int(other[1]) < int(match[1]):
            yield folder


def _get_location(folder: Folder) -> Location:
    return folder.path if isinstance(folder, LocalFolder) else folder.place
