"""Shows, verifies, compares, exports and prunes checkpoints."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from models.run_folder import find_run_folder
from store.query.record import RunRecord
from utils.checkpoint.files import (
    CheckpointError,
    inspect_checkpoint,
    load_checkpoint,
    verify_checkpoint,
)
from utils.checkpoint.find import find_checkpoint, iterate_checkpoints, load_newest, read_best_step
from utils.errors import EXIT_FAILED, UserError
from utils.storage.folder import ASIDE, Folder
from utils.weights.adapters import merge_adapters
from utils.weights.files import write_pickled, write_weights

_MIB = 1 << 20


def list_checkpoints(options: argparse.Namespace) -> None:
    """Print a line for each checkpoint, newest last, without reading tensors."""
    folders = _find_all(options.place)
    best = _read_best(folders[0].parent)
    print(f"{'checkpoint':<16} {'MiB':>9} {'tensors':>8} {'best so far':>12}  state")
    for folder in reversed(folders):
        try:
            facts = inspect_checkpoint(folder)
        except CheckpointError as error:
            print(f"{folder.name:<16} {'':>9} {'':>8} {'':>12}  broken: {_shorten(error, folder)}")
            continue
        size, score = sum(facts.files.values()) / _MIB, facts.best_metric
        state = "best" if facts.step == best else ""
        shown = "" if score is None else f"{score:.2f}"
        row = f"{folder.name:<16} {size:>9.1f} {len(facts.tensors):>8} {shown:>12}  {state}"
        print(row.rstrip())
    for name in sorted(folders[0].parent.list_names()):
        if name.startswith(ASIDE):
            print(f"{name}  set aside: no run reads it, prune leaves it; delete it by hand")


def verify_checkpoints(options: argparse.Namespace) -> int:
    """Print whether each is whole or broken; return 1 if any is broken."""
    broken = 0
    for place in options.place:
        for folder in reversed(_find_all(place)):
            reason = _find_fault(folder)
            broken += reason is not None
            print(f"{folder}: {'whole' if reason is None else f'broken: {reason}'}")
    return EXIT_FAILED if broken else 0


def diff_checkpoints(options: argparse.Namespace) -> int:
    """Print the tensors that differ, largest difference first; return 1 if any does."""
    first, second = (_load(place) for place in (options.first, options.second))
    names = set(filter(None, options.parts.split(",")))
    if unknown := names - first.keys() - second.keys():
        raise UserError(f"--parts names {', '.join(sorted(unknown))}, which neither side has")
    flat = flatten(first, names)
    lines = compare(flat, flatten(second, names))
    for line in lines[: options.limit]:
        print(line)
    if len(lines) > options.limit:
        print(f"... and {len(lines) - options.limit} more; see --limit")
    count = len(flat)
    print(f"{len(lines)} of {count} tensors differ" if lines else f"{count} tensors are equal")
    return EXIT_FAILED if lines else 0


def flatten(parts: dict[str, dict[str, Tensor]], names: set[str]) -> dict[str, Tensor]:
    """Return `part/name` -> tensor, of the named parts or of all."""
    return {
        f"{part}/{name}": tensor
        for part, tensors in parts.items()
        if not names or part in names
        for name, tensor in tensors.items()
    }


def compare(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    """Describe each tensor that differs in a line, largest difference first."""
    lines = [f"only in A: {name}" for name in first if name not in second]
    lines += [f"only in B: {name}" for name in second if name not in first]
    differences = []
    for name in first.keys() & second.keys():
        difference = _measure(first[name], second[name])
        if difference is not None:
            differences.append((*difference, name))
    differences.sort(key=lambda item: (-item[0], item[2]))
    return lines + [f"{name}: {words}" for _, words, name in differences]


def _find_run_id(place: str) -> dict[str, str]:
    """Find the run of weights, so that the lineage of a student survives a move of the run."""
    folder = find_run_folder(place)
    try:
        run_id = None if folder is None else RunRecord(folder).facts.id
    except UserError:
        return {}
    return {"run": run_id} if run_id else {}


def export_checkpoints(options: argparse.Namespace) -> None:
    """Write a checkpoint's weights to one file, and beside it the JSON that describes the model."""
    place, parts, facts = load_newest(find_checkpoint(options.place))
    part = options.weights
    if part == "best":
        part = "ema" if "ema" in parts else "model"
    kinds = [name for name in parts if name == "model" or name.startswith("ema")]
    if part not in kinds:
        raise UserError(f"--weights {part}: {place} holds {', '.join(kinds)}; choose one of them")
    tensors, model = merge_adapters(parts[part]), facts.model
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write = {".safetensors": write_weights, ".pth": write_pickled}.get(options.out.suffix)
    if write is None:
        raise UserError(f"--out {options.out}: end it with .safetensors or .pth")
    write(options.out, tensors, {**model, "step": facts.step, **_find_run_id(options.place)})
    print(f"{options.out}: {part} of {place}, {len(tensors)} tensors")


def prune_checkpoints(options: argparse.Namespace) -> None:
    """Delete what is neither new, best nor a multiple, after all have been verified."""
    folders = _find_all(options.place)
    faults = {folder.name: _find_fault(folder) for folder in folders}
    whole = [folder for folder in folders if faults[folder.name] is None]
    if not whole:
        raise UserError(f"{options.place}: none of {len(folders)} checkpoints is whole; kept all")
    best = _read_best(folders[0].parent)
    kept = {folder.name for folder in whole[: max(options.keep, 1)]}
    for folder in folders:
        step = int(folder.name.rpartition("_")[2])
        is_multiple = bool(options.keep_every) and step % options.keep_every == 0
        is_broken = faults[folder.name] is not None
        is_kept = not options.broken if is_broken else step == best or is_multiple
        if folder.name in kept or is_kept:
            continue
        print(f"{'would delete' if options.dry_run else 'deleted'} {folder}")
        if not options.dry_run:
            folder.remove()


def _read_best(folder: Folder) -> int | None:
    """Read the best step; if it cannot be read, nothing may be deleted."""
    try:
        return read_best_step(folder)
    except CheckpointError as error:
        raise UserError(f"{error}; repair or delete that file first") from error


def _find_all(place: str) -> list[Folder]:
    """Find the checkpoints of a place, newest first; at least one."""
    folders = list(iterate_checkpoints(place))
    if not folders:
        raise UserError(f"{place}: no checkpoint there; give a run or a step_... directory")
    return folders


def _find_fault(folder: Folder) -> str | None:
    try:
        verify_checkpoint(folder)
    except CheckpointError as error:
        return _shorten(error, folder)
    return None


def _shorten(error: Exception, folder: Folder) -> str:
    """Return the reason without the path, which the line already has."""
    return str(error).removeprefix(f"{folder}: ")


def _load(place: str) -> dict[str, dict[str, Tensor]]:
    try:
        return load_checkpoint(find_checkpoint(place, verify=False))[0]
    except CheckpointError as error:
        raise UserError(f"{error}; choose another checkpoint") from error


def _measure(first: Tensor, second: Tensor) -> tuple[float, str] | None:
    """Return the largest absolute difference and its description; None if all bits are equal."""
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        kinds = [f"{tuple(t.shape)} {str(t.dtype)[6:]}" for t in (first, second)]
        return float("inf"), f"{kinds[0]} in A, {kinds[1]} in B"
    if torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (first, second))):
        return None
    a, b = first.double(), second.double()
    distance = (a - b).abs()
    largest = float(distance.nan_to_num(nan=float("inf")).max())
    scale = float(a.abs().max())
    relative = largest / scale if scale else float("inf")
    count = int((distance != 0).sum())
    words = f"max difference {largest:.3e} ({relative:.1e} of the largest value), "
    return largest, words + f"{count} of {first.numel()} elements"
