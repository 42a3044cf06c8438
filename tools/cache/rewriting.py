"""Caches made of others: parts and teachers put together, or less of what is there."""

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
from tasks.teachers.cache.manifest import (
    get_file_name,
    read_further,
    read_manifest,
    read_shape,
    write_manifest,
)
from tasks.teachers.cache.reader import TeacherCache
from tasks.teachers.cache.rows import (
    CLASSES,
    CacheShape,
    Column,
    measure_errors,
    pack_rows,
    unpack_values,
)
from tasks.teachers.cache.writer import CacheWriter
from tools.cache.card import JUDGED, make_card, read_judged, write_card
from tools.cache.damage import find_damage
from tools.cache.shelf import Shelf
from utils.errors import UserError
from utils.json_types import JsonMapping
from utils.storage.folder import Folder
from utils.storage.local import LocalFolder
from utils.storage.places import open_folder

# A column of a cache that is read: which of the caches, and which of its columns.
Origin = tuple[int, int]


def merge(options: argparse.Namespace) -> int:
    """Put caches together; gives the exit code."""
    folders = [open_folder(place) for place in options.caches]
    if len(folders) < 2:
        raise UserError(f"merge takes two caches or more and got {options.caches[0]!r} alone")
    manifests = [read_manifest(folder) for folder in folders]
    shelf = _prepare(options.out, folders)
    out, first = shelf.path, manifests[0]
    for folder, other in zip(folders[1:], manifests[1:], strict=True):
        for key in ("stream", "steps_per_epoch"):
            if other[key] != first[key]:
                raise UserError(
                    f"{str(folder)!r} was made for another {key} than {str(folders[0])!r}: "
                    f"{_tell_difference(first[key], other[key])}; only answers to one stream merge"
                )
    if all(one["columns"] == first["columns"] for one in manifests):
        _join_parts(folders, manifests, out)
    else:
        _join_teachers(folders, manifests, out)
    _copy_known(folders, out)
    _finish(shelf)
    print(f"merged {len(folders)} caches: {shelf.folder}")
    return 0


def cut(options: argparse.Namespace) -> int:
    """Write less of a cache; gives the exit code."""
    folder = open_folder(options.cache)
    manifest = read_manifest(folder)
    shape = read_shape(manifest)
    shelf = _prepare(options.out, [folder])
    numbers = _choose(shape.columns, options.teachers)
    columns = tuple(_narrow(shape.columns[number], options) for number in numbers)
    wanted = options.augmentations
    if wanted is not None and not 1 <= wanted <= shape.epochs:
        raise UserError(f"--augmentations ({wanted}) must lie between 1 and {shape.epochs}")
    smaller = dataclasses.replace(shape, columns=columns, epochs=wanted or shape.epochs)
    if wanted not in (None, shape.epochs):
        smaller = dataclasses.replace(smaller, steps=None)
    origins = [(0, number) for number in numbers]
    _rewrite([folder], origins, smaller, manifest, shelf.path)
    _copy_known([folder], shelf.path)
    _finish(shelf)
    sizes = f"{shape.row_dtype.itemsize} -> {smaller.row_dtype.itemsize} bytes an example"
    print(f"{sizes}: {shelf.folder}")
    return 0


def _prepare(place: str, folders: Sequence[Folder]) -> Shelf:
    """The place to write to, which is none of those that are read."""
    shelf = Shelf(place)
    for folder in folders:
        is_same = shelf.folder.place == folder.place
        if isinstance(folder, LocalFolder):
            is_same |= folder.path.resolve() == shelf.path.resolve()
        if is_same:
            raise UserError(f"--out ({place!r}) is a cache that is read; name another directory")
    shelf.prepare()
    return shelf


def _finish(shelf: Shelf) -> None:
    """Write the card and bring everything to its place."""
    write_card(shelf.path)
    shelf.send_all()


def _tell_difference(left: object, right: object) -> str:
    """The first entry that differs."""
    if isinstance(left, dict) and isinstance(right, dict):
        for key in sorted(left.keys() | right.keys()):
            if left.get(key) != right.get(key):
                return f"{key} {right.get(key)!r} instead of {left.get(key)!r}"
    return f"{right!r} instead of {left!r}"


def _join_parts(folders: Sequence[Folder], manifests: Sequence[JsonMapping], out: Path) -> None:
    """One cache of files of several, each of which has some of them."""
    if len({one["writers"] for one in manifests}) > 1:
        raise UserError(
            f"the caches were written by {[one['writers'] for one in manifests]} processes; only "
            "parts written by equally many merge"
        )
    longest = max(manifests, key=lambda one: read_shape(one).total_steps)
    shape, writers = read_shape(longest), longest["writers"]
    is_reused = any(one["is_reused"] for one in manifests)
    names = [
        get_file_name(epoch, writer, writers)
        for epoch in range(shape.epochs)
        for writer in range(writers)
    ]
    there = [set(folder.list_names()) for folder in folders]
    for name in names:
        owner = next((n for n, files in enumerate(there) if name in files), None)
        if owner is None:
            raise UserError(
                f"none of {', '.join(map(str, folders))} has {name}; store that part first"
            )
        for one in (name, f"{name[:-4]}.json"):
            if one in there[owner]:
                with folders[owner].open_local(one) as path:
                    LocalFolder(out).put_file(path, one)
    further = read_further(longest)
    write_manifest(out, longest["stream"], shape, writers, is_reused=is_reused, further=further)
    faults = find_damage(str(out))
    if faults:
        raise UserError(faults[0])


def _join_teachers(folders: Sequence[Folder], manifests: Sequence[JsonMapping], out: Path) -> None:
    """One cache of the columns of several."""
    shapes = [read_shape(one) for one in manifests]
    lengths = [shape.total_steps for shape in shapes]
    if len(set(lengths)) > 1:
        raise UserError(
            f"the caches hold {lengths} steps; store more of the shorter ones, or take less of the "
            "others by python -m tools.cache subset --augmentations"
        )
    columns, origins = [], []
    for number, shape in enumerate(shapes):
        for place, column in enumerate(shape.columns):
            key = (column.teacher, column.part)
            if key in [(one.teacher, one.part) for one in columns]:
                raise UserError(
                    f"{str(folders[number])!r} has answers of teacher {column.teacher} that "
                    "another one has, too, in another form; take one of them by subset --teachers"
                )
            columns.append(column)
            origins.append((number, place))
    shape = dataclasses.replace(shapes[0], columns=tuple(columns))
    merged = {**manifests[0], "is_reused": any(one["is_reused"] for one in manifests)}
    _rewrite(folders, origins, shape, merged, out)


def _rewrite(
    folders: Sequence[Folder],
    origins: Sequence[Origin],
    shape: CacheShape,
    manifest: JsonMapping,
    out: Path,
) -> None:
    """Write a cache's rows from those of others; continues where it was interrupted."""
    caches = [TeacherCache(folder) for folder in folders]
    noted = [make_card(folder)["teachers"] for folder in folders]
    write_manifest(
        out, manifest["stream"], shape, 1,
        is_reused=manifest["is_reused"], further=read_further(manifest),
    )  # fmt: skip
    try:
        for epoch in range(shape.epochs):
            writer = CacheWriter(out, shape, epoch)
            while not writer.is_complete:
                step = epoch * shape.steps_per_epoch + writer.steps_done
                sources = [one.read_rows(step) for one in caches]
                rows, errors = _convert(sources, caches, origins, shape)
                before = [noted[cache][number] for cache, number in origins]
                writer.append(rows, [_add(*pair) for pair in zip(errors, before, strict=True)])
    finally:
        for cache in caches:
            cache.close()


def _convert(
    sources: Sequence[np.ndarray],
    caches: Sequence[TeacherCache],
    origins: Sequence[Origin],
    shape: CacheShape,
) -> tuple[np.ndarray, list[tuple[float, float, int]]]:
    """Rows of the new shape and what the change costs each of their columns."""
    answers = []
    for (cache, number), column in zip(origins, shape.columns, strict=True):
        old = caches[cache].columns[number]
        answers.append(_read_answer(sources[cache], number, old, column))
    rows = pack_rows(answers, shape)
    errors = measure_errors(rows, answers, shape)
    for place, ((cache, number), column) in enumerate(zip(origins, shape.columns, strict=True)):
        if caches[cache].columns[number] == column:  # bit for bit, int8 too
            for field, _, _ in column.list_fields(place):
                kind = field.removesuffix(str(place))
                rows[field] = sources[cache][f"{kind}{number}"]
            errors[place] = (0.0, 0.0, errors[place][2])
    marks = [source["example"] for source in sources]
    for other in marks[1:]:
        if ((other != marks[0]) & (other > 0) & (marks[0] > 0)).any():
            raise UserError("the caches hold answers to other examples than each other")
    rows["example"] = marks[0]
    return rows, errors


def _read_answer(rows: np.ndarray, number: int, old: Column, column: Column) -> Tensor:
    """A stored answer as a task gives it, of fewer classes where fewer are kept."""
    values = torch.from_numpy(unpack_values(rows, number, old).astype(np.float64))
    if old.kind != CLASSES:
        return values.float()
    k = column.top_k
    indices = torch.from_numpy(rows[f"indices{number}"].astype(np.float64))
    rest = torch.from_numpy(np.exp(rows[f"rest{number}"].astype(np.float64)))
    rest = rest + values[..., k:].exp().sum(dim=-1)
    return torch.cat([values[..., :k], indices[..., :k], rest.unsqueeze(-1)], dim=-1)


def _add(errors: tuple[float, float, int], before: JsonMapping) -> tuple[float, float, int]:
    """Errors of a change upon those that were there: what they are at most."""
    greatest, total, count = errors
    return greatest + (before["max_error"] or 0), total + count * (before["mean_error"] or 0), count


def _choose(columns: Sequence[Column], teachers: Sequence[str]) -> list[int]:
    """Numbers of the columns of the named teachers."""
    if not teachers:
        return list(range(len(columns)))
    known = [column.teacher for column in columns]
    for teacher in teachers:
        if teacher not in known:
            raise UserError(
                f"--teachers ({teacher!r}) is not in this cache; it has {', '.join(known)}"
            )
    return [number for number, name in enumerate(known) if name in teachers]


def _narrow(column: Column, options: argparse.Namespace) -> Column:
    """A column as it will be."""
    top_k = column.top_k
    if options.top_k is not None and top_k:
        if not 1 <= options.top_k <= top_k:
            raise UserError(f"--top-k ({options.top_k}) must lie between 1 and {top_k}")
        top_k = options.top_k
    return dataclasses.replace(column, top_k=top_k, dtype=options.dtype or column.dtype)


def _copy_known(folders: Sequence[Folder], out: Path) -> None:
    """What is known of the teachers that the new cache has: their accuracy, and their lineage."""
    target = LocalFolder(out)
    columns = read_shape(read_manifest(target)).columns
    hashes = {name for column in columns for name in column.teacher.split("+")}
    ancestors = choose_taught(join_notes(read_note(folder) for folder in folders), hashes)
    if ancestors:
        target.write_text(LINEAGE_FILE, format_note(ancestors))
    judged: dict[str, object] = {}
    for folder in folders:
        judged |= read_judged(folder)
    if judged:
        target.write_text(JUDGED, json.dumps(judged, indent=2) + "\n")
