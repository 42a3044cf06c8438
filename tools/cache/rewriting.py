"""Caches made of others: parts and teachers joined, or a subset."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from store.lineage.ancestors import LINEAGE_FILE, choose_taught, format_note, join_notes, read_note
from tasks.teachers.cache.manifest import read_further, read_manifest, read_shape, write_manifest
from tasks.teachers.cache.reader import TeacherCache
from tasks.teachers.cache.rows import (
    CLASSES,
    CacheShape,
    Column,
    measure_errors,
    pack_rows,
    unpack_values,
)
from tasks.teachers.cache.writer import CacheWriter, Errors
from tools.cache.card import SCORES, get_facts_name, list_files, make_card, read_scores, write_card
from tools.cache.damage import find_damage
from tools.cache.directory import CacheDirectory, copy_files
from utils.errors import UserError
from utils.json_types import JsonMapping, JsonObject, JsonValue
from utils.storage.folder import Folder
from utils.storage.local import LocalFolder
from utils.storage.places import open_folder

# A column that is read: the number of its cache, and its number there.
Origin = tuple[int, int]


def merge(options: argparse.Namespace) -> None:
    """Join caches."""
    folders = [open_folder(path) for path in options.caches]
    if len(folders) < 2:
        raise UserError(f"merge takes two caches or more, got {options.caches[0]!r} alone")
    manifests = [read_manifest(folder) for folder in folders]
    target = _prepare(options.out, folders)
    first = manifests[0]
    for folder, other in zip(folders[1:], manifests[1:], strict=True):
        for key in ("stream", "steps_per_epoch"):
            if other[key] != first[key]:
                raise UserError(
                    f"{str(folder)!r} was made for another {key} than {str(folders[0])!r}: "
                    f"{_describe_difference(first[key], other[key])}; only outputs for one stream "
                    "merge"
                )
    is_parts = all(manifest["columns"] == first["columns"] for manifest in manifests)
    (_join_parts if is_parts else _join_teachers)(folders, manifests, target.path)
    _finish(folders, target)
    print(f"merged {len(folders)} caches: {target.folder}")


def cut(options: argparse.Namespace) -> None:
    """Write a subset of a cache."""
    folder = open_folder(options.cache)
    manifest = read_manifest(folder)
    shape = read_shape(manifest)
    target = _prepare(options.out, [folder])
    numbers = _choose(shape.columns, options.teachers)
    columns = tuple(_narrow(shape.columns[number], options) for number in numbers)
    epochs = options.augmentations
    if epochs is not None and not 1 <= epochs <= shape.epochs:
        raise UserError(f"--augmentations ({epochs}) must lie between 1 and {shape.epochs}")
    smaller = dataclasses.replace(shape, columns=columns, epochs=epochs or shape.epochs)
    if epochs not in (None, shape.epochs):
        smaller = dataclasses.replace(smaller, steps=None)
    _rewrite([folder], [(0, number) for number in numbers], smaller, manifest, target.path)
    _finish([folder], target)
    sizes = f"{shape.row_dtype.itemsize} -> {smaller.row_dtype.itemsize} bytes an example"
    print(f"{sizes}: {target.folder}")


def _prepare(out: str, folders: Sequence[Folder]) -> CacheDirectory:
    """Create the target, which must differ from the caches that are read."""
    target = CacheDirectory(out)
    for folder in folders:
        is_same = target.folder.place == folder.place
        if isinstance(folder, LocalFolder):
            is_same |= folder.path.resolve() == target.path.resolve()
        if is_same:
            raise UserError(f"--out ({out!r}) is a cache that is read; name another directory")
    target.prepare()
    return target


def _finish(folders: Sequence[Folder], target: CacheDirectory) -> None:
    """Copy lineage and scores of the teachers that are left, write the card and upload all."""
    local = LocalFolder(target.path)
    columns = read_shape(read_manifest(local)).columns
    hashes = {name for column in columns for name in column.teacher.split("+")}
    if ancestors := choose_taught(join_notes(read_note(folder) for folder in folders), hashes):
        local.write_text(LINEAGE_FILE, format_note(ancestors))
    scores: JsonObject = {}
    for folder in folders:
        scores |= read_scores(folder)
    if scores:
        local.write_text(SCORES, json.dumps(scores, indent=2) + "\n")
    write_card(target.path)
    target.send_all()


def _describe_difference(left: JsonValue, right: JsonValue) -> str:
    if isinstance(left, dict) and isinstance(right, dict):
        for key in sorted(left.keys() | right.keys()):
            if left.get(key) != right.get(key):
                return f"{key} {right.get(key)!r} instead of {left.get(key)!r}"
    return f"{right!r} instead of {left!r}"


def _join_parts(folders: Sequence[Folder], manifests: Sequence[JsonMapping], out: Path) -> None:
    """Join caches of which each has some of the files."""
    counts = [manifest["writers"] for manifest in manifests]
    if len(set(counts)) > 1:
        raise UserError(
            f"the caches were written by {counts} processes; only parts written by equally many "
            "merge"
        )
    longest = max(manifests, key=lambda manifest: read_shape(manifest).total_steps)
    shape, writers = read_shape(longest), longest["writers"]
    is_reused = any(manifest["is_reused"] for manifest in manifests)
    existing = [set(folder.list_names()) for folder in folders]
    for name in list_files(shape, writers):
        owner = next((n for n, files in enumerate(existing) if name in files), None)
        if owner is None:
            raise UserError(
                f"none of {', '.join(map(str, folders))} has {name}; store that part first"
            )
        pair = [file for file in (name, get_facts_name(name)) if file in existing[owner]]
        copy_files(folders[owner], pair, out)
    further = read_further(longest)
    write_manifest(out, longest["stream"], shape, writers, is_reused=is_reused, further=further)
    if faults := find_damage(str(out)):
        raise UserError(faults[0])


def _join_teachers(folders: Sequence[Folder], manifests: Sequence[JsonMapping], out: Path) -> None:
    """Join the columns of caches."""
    shapes = [read_shape(manifest) for manifest in manifests]
    lengths = [shape.total_steps for shape in shapes]
    if len(set(lengths)) > 1:
        raise UserError(
            f"the caches hold {lengths} steps; store more of the shorter ones, or take less of the "
            "others by python -m tools.cache subset --augmentations"
        )
    columns: dict[tuple[str, str], Column] = {}
    origins = []
    for cache, shape in enumerate(shapes):
        for number, column in enumerate(shape.columns):
            key = (column.teacher, column.part)
            if key in columns:
                raise UserError(
                    f"{str(folders[cache])!r} has outputs of teacher {column.teacher} that "
                    "another cache has in another form; take one of them by subset --teachers"
                )
            columns[key] = column
            origins.append((cache, number))
    shape = dataclasses.replace(shapes[0], columns=tuple(columns.values()))
    is_reused = any(manifest["is_reused"] for manifest in manifests)
    _rewrite(folders, origins, shape, {**manifests[0], "is_reused": is_reused}, out)


def _rewrite(
    folders: Sequence[Folder],
    origins: Sequence[Origin],
    shape: CacheShape,
    manifest: JsonMapping,
    out: Path,
) -> None:
    """Write a cache's rows from those of others; continues where it was interrupted."""
    caches = [TeacherCache(folder) for folder in folders]
    cards = [make_card(folder)["teachers"] for folder in folders]
    before = [cards[cache][number] for cache, number in origins]
    further, is_reused = read_further(manifest), manifest["is_reused"]
    write_manifest(out, manifest["stream"], shape, 1, is_reused=is_reused, further=further)
    try:
        for epoch in range(shape.epochs):
            writer = CacheWriter(out, shape, epoch)
            while not writer.is_complete:
                step = epoch * shape.steps_per_epoch + writer.steps_done
                sources = [cache.read_rows(step) for cache in caches]
                rows, errors = _convert(sources, caches, origins, shape)
                writer.append(rows, [_add(*pair) for pair in zip(errors, before, strict=True)])
    finally:
        for cache in caches:
            cache.close()


def _convert(
    sources: Sequence[np.ndarray],
    caches: Sequence[TeacherCache],
    origins: Sequence[Origin],
    shape: CacheShape,
) -> tuple[np.ndarray, list[Errors]]:
    """Return rows of the new shape, and the errors that the conversion adds to each column."""
    outputs = []
    for (cache, number), column in zip(origins, shape.columns, strict=True):
        old = caches[cache].columns[number]
        outputs.append(_read_output(sources[cache], number, old, column))
    rows = pack_rows(outputs, shape)
    errors = measure_errors(rows, outputs, shape)
    for new, ((cache, number), column) in enumerate(zip(origins, shape.columns, strict=True)):
        if caches[cache].columns[number] == column:  # bit for bit, int8 too
            for field, _, _ in column.list_fields(new):
                rows[field] = sources[cache][f"{field.removesuffix(str(new))}{number}"]
            errors[new] = (0.0, 0.0, errors[new][2])
    marks = [source["example"] for source in sources]
    for other in marks[1:]:
        if ((other != marks[0]) & (other > 0) & (marks[0] > 0)).any():
            raise UserError("the caches hold outputs for different examples; they cannot be merged")
    rows["example"] = marks[0]
    return rows, errors


def _read_output(rows: np.ndarray, number: int, old: Column, column: Column) -> Tensor:
    """Return a stored output as a task gives it, condensed to the classes of the new column."""
    values = torch.from_numpy(unpack_values(rows, number, old).astype(np.float64))
    if old.kind != CLASSES:
        return values.float()
    k = column.top_k
    indices = torch.from_numpy(rows[f"indices{number}"].astype(np.float64))
    rest = torch.from_numpy(np.exp(rows[f"rest{number}"].astype(np.float64)))
    rest = rest + values[..., k:].exp().sum(dim=-1)
    return torch.cat([values[..., :k], indices[..., :k], rest.unsqueeze(-1)], dim=-1)


def _add(errors: Errors, before: JsonMapping) -> Errors:
    """Add errors of a conversion to those of its source: upper bounds."""
    greatest, total, count = errors
    return greatest + (before["max_error"] or 0), total + count * (before["mean_error"] or 0), count


def _choose(columns: Sequence[Column], teachers: Sequence[str]) -> list[int]:
    """Return the numbers of the columns of the named teachers, of all if none is named."""
    known = [column.teacher for column in columns]
    for teacher in teachers:
        if teacher not in known:
            raise UserError(
                f"--teachers ({teacher!r}) is not in this cache; it has {', '.join(known)}"
            )
    return [number for number, name in enumerate(known) if not teachers or name in teachers]


def _narrow(column: Column, options: argparse.Namespace) -> Column:
    """Return a column with the classes and the type of the flags."""
    top_k = column.top_k
    if options.top_k is not None and top_k:
        if not 1 <= options.top_k <= top_k:
            raise UserError(f"--top-k ({options.top_k}) must lie between 1 and {top_k}")
        top_k = options.top_k
    return dataclasses.replace(column, top_k=top_k, dtype=options.dtype or column.dtype)
