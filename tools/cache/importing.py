"""Published answers as a cache: what each image was shown as, and what the teacher said of it."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from big_vision.input.order import ShardSpec
from big_vision.input.source import Reading
from big_vision.pp.stored_views import VIEWS, VIEWS_JSON, ViewFacts, ViewForm, describe_views
from datasets import create_loader, create_source
from job.check import check
from store.lineage.ancestors import CACHE, LINEAGE_FILE, Ancestor, format_note
from tasks.teachers.cache.by_example import describe_images, find_views
from tasks.teachers.cache.manifest import (
    BY_EXAMPLE,
    MANIFEST,
    describe_classes,
    get_file_name,
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
)
from tasks.teachers.cache.writer import CacheWriter
from tools.cache.card import JUDGED, write_card
from tools.cache.reinforced import ReinforcedFiles
from tools.cache.seeded import SeededFiles
from tools.cache.shelf import Shelf
from utils.config.distill import DistillSection
from utils.config.load import change, load_config
from utils.errors import UserError
from utils.programs import get_run_flags
from utils.runtime.launcher import create_runtime
from utils.storage.json_files import write_json
from utils.storage.local import LocalFolder, compute_crc32c, sync_file, write_atomically
from utils.storage.places import open_folder, to_path

if TYPE_CHECKING:
    from torch import Tensor

    from big_vision.input.source import Reader
    from job.spec import Job

# Images that are read and stored at a time.
_LOT = 1024
_COLLECTED, _PROGRESS, _PART = "collected.part", "collected.progress", "views.part"
# Lots between two notes of what is safe.
_NOTED_LOTS = 20
# Batches on which the answers are held against the labels.
_JUDGED_BATCHES = 8
_NAMED_BY = ("sorted", "stem")


class PublishedFiles(Protocol):
    """What a form of published answers tells; see `ReinforcedFiles`."""

    teacher: str
    form: ViewForm
    epochs: int
    width: int
    top_k: int
    identity: str

    def list_ids(self) -> set[str]:
        """Of all images that have answers."""

    def read(self, ids: Sequence[str]) -> tuple[np.ndarray, Tensor]:
        """Views and condensed answers of some images, an epoch after the other."""


FORMS: dict[str, Callable[[argparse.Namespace, int], PublishedFiles]] = {
    "imagenet_plus": lambda options, _: ReinforcedFiles(options.source),
    "tinyvit": lambda options, classes: SeededFiles(options.source, options.saved_config, classes),
}


def import_published(options: argparse.Namespace) -> int:
    """Write the cache; gives the exit code."""
    shelf = Shelf(options.out)
    out = shelf.path
    taught = f"--distill.teacher_cache={options.out}"
    config = load_config([*get_run_flags(options), taught])
    create_runtime(config.runtime)  # before TensorFlow
    # The student alone: what it will be taught by is not there yet.
    job = check(change(config, distill=DistillSection().model_dump()))
    _check_run(job, shelf)
    files = FORMS[options.form](options, job.stream["num_classes"])
    _check_classes(files, job, options.source)
    if _is_there(shelf, files, options.dtype):
        print(f"{shelf.folder} holds them already")
        return 0
    ids = find_ids(options, files, job)
    shelf.prepare()
    target = _Target(out, files, ids, options.dtype)
    target.collect()
    shelf.send((VIEWS, VIEWS_JSON))
    target.write(describe_images(job.stream, out), job.facts.class_names)
    judged = judge(job, out)
    write_json(out / JUDGED, {files.identity: judged})
    elder = Ancestor(1, CACHE, files.identity, f"{options.form}: {files.teacher}")
    write_atomically(out / LINEAGE_FILE, format_note([elder]))
    write_card(out)
    shelf.send_all()
    print(f"imported {files.epochs} views of {len(ids)} images: {shelf.folder}")
    return 0


def _is_there(shelf: Shelf, files: PublishedFiles, dtype: str) -> bool:
    """Whether a place elsewhere has the whole cache, whose manifest comes last.

    Raises:
      UserError: another cache lies there, or here.
    """
    if MANIFEST not in shelf.folder.list_names():
        return False
    columns = read_shape(read_manifest(shelf.folder)).columns
    if columns != (describe_column(files, dtype),):
        raise UserError(f"--out ({shelf.folder.place!r}) holds another cache; name another place")
    return not isinstance(shelf.folder, LocalFolder)


def describe_column(files: PublishedFiles, dtype: str) -> Column:
    """What is stored of published answers."""
    return Column(
        files.identity, CLASSES, files.width, files.top_k, dtype=dtype, name=files.teacher
    )


def _check_run(job: Job, shelf: Shelf) -> None:
    """Refuse a run that could not be shown the views, before anything is read."""
    if "num_classes" not in job.stream or "train_pp" not in job.stream:
        raise UserError(
            f"published answers are to images with one class each; train.task "
            f"({job.config.train.task}) has others"
        )
    place = find_views(job.stream, shelf.folder)
    if open_folder(place).place != shelf.folder.place:
        raise UserError(
            f"data.train_pp shows the views of {place!r}, and --out ({shelf.folder.place!r}) is "
            "where they will lie; name one place in both"
        )


def _check_classes(files: PublishedFiles, job: Job, source: str) -> None:
    found = job.stream["num_classes"]
    if found != files.width:
        raise UserError(
            f"{source!r} holds answers of {files.width} classes, the run's student has {found}; "
            "name the dataset that they were published for"
        )


# ---- which file is whose


def find_ids(options: argparse.Namespace, files: PublishedFiles, job: Job) -> list[str]:
    """The published name of each example of the training split, in its order."""
    published = files.list_ids()
    numbered = all(name.isdecimal() for name in published)
    reader = _open_reader(job)
    try:
        count = reader.num_examples
        rule = options.ids or _NAMED_BY[0 if numbered else 1]
        found = _name_examples(rule, reader, count)
    finally:
        reader.close()
    lacking = [name for name in found if name not in published]
    is_other = rule in _NAMED_BY and len(published) != count
    if len(set(found)) != count or lacking or is_other:
        example = f", the first without is {lacking[0]!r}" if lacking else ""
        raise UserError(
            f"{options.source!r} holds answers to {len(published)} images and data.train_split has "
            f"{count} examples of {len(set(found))} names{example}; name the whole split, or the "
            "examples by --ids"
        )
    return found


def _open_reader(job: Job) -> Reader:
    # The names are asked for, no image: a string that shows views which are not yet there waits.
    data = change(job.config, data={"train_pp": job.config.data.eval_pp}).data
    source = create_source(data, job.config.model.known_sizes)
    spec = ShardSpec(0, 1, data.global_batch_size)
    return source.open(source.select("train"), Reading("train", spec, job.config.train.seed))


def _name_examples(rule: str, reader: Reader, count: int) -> list[str]:
    """Published names by a rule, or from a file."""
    if rule not in _NAMED_BY:
        try:
            lines = to_path(rule, "--ids").read_text(encoding="utf-8").split("\n")
        except OSError as error:
            raise UserError(
                f"--ids ({rule!r}) is neither {' nor '.join(_NAMED_BY)} nor a file ({error})"
            ) from error
        names = [line.strip() for line in lines if line.strip()]
        if len(names) != count:
            raise UserError(f"--ids ({rule!r}) has {len(names)} lines for {count} examples")
        return names
    names = list(reader.get_ids(np.arange(count)))
    if not all("/" in name for name in names[:1]):
        raise UserError(
            f"--ids {rule} needs examples that lie in class folders, and these are called "
            f"{names[0]!r}; write the published name of each into a text file, a line each, and "
            "name that file by --ids"
        )
    if rule == "stem":
        return [PurePosixPath(name).stem for name in names]
    order = sorted(range(count), key=lambda number: PurePosixPath(names[number]).parts)
    places = {number: str(place) for place, number in enumerate(order)}
    return [places[number] for number in range(count)]


# ---- what is stored


class _Target:
    """The directory that is written, first what was published, then an epoch after the other.

    Rows lie in the order of the examples. What is collected, and noted as such, is not read again.
    """

    def __init__(self, out: Path, files: PublishedFiles, ids: list[str], dtype: str) -> None:
        self._out, self._files, self._ids = out, files, ids
        column, lot = describe_column(files, dtype), min(_LOT, len(ids))
        self._lots = -(-len(ids) // lot)
        self._shape = CacheShape((column,), files.epochs, self._lots, lot)
        self._errors = [[(0.0, 0.0, 0)] for _ in range(files.epochs)]

    def collect(self) -> None:
        """All views, and all answers as rows, from the published files."""
        done = self._read_progress()
        if done == 0 and self._is_whole():
            return
        if done < self._lots:
            (self._out / VIEWS_JSON).unlink(missing_ok=True)
            views = self._map(_PART, self._files.form.row_dtype, done)
            rows = self._map(_COLLECTED, self._shape.row_dtype, done)
            for lot in range(done, self._lots):
                self._collect_lot(lot, views, rows)
                if (lot + 1) % _NOTED_LOTS == 0 or lot == self._lots - 1:
                    views.flush()
                    rows.flush()
                    self._note_progress(lot + 1)
        self._name_views()

    def _is_whole(self) -> bool:
        """Whether nothing is left to do but to describe it."""
        names = [get_file_name(epoch, 0, 1) for epoch in range(self._shape.epochs)]
        return all((self._out / name).is_file() for name in (VIEWS_JSON, *names))

    def write(self, stream: dict, class_names: Sequence[str] | None) -> None:
        """An epoch's file after the other, and what tells of them."""
        lot = self._shape.global_batch_size
        layout = {"layout": BY_EXAMPLE, "examples": len(self._ids), "rows_per_step": lot}
        further = {**layout, **describe_classes(class_names)}
        write_manifest(self._out, stream, self._shape, 1, is_reused=True, further=further)
        collected = self._out / _COLLECTED
        for epoch in range(self._shape.epochs):
            writer = CacheWriter(self._out, self._shape, epoch)
            while not writer.is_complete:
                rows = np.memmap(collected, self._shape.row_dtype, mode="r", shape=self._grid)
                first = writer.steps_done * lot
                # All of an epoch's errors were measured as it was collected.
                errors = self._errors[epoch] if first == 0 else ()
                writer.append(rows[epoch, first : first + lot], errors)
        for name in (_COLLECTED, _PROGRESS):
            (self._out / name).unlink(missing_ok=True)

    @property
    def _grid(self) -> tuple[int, int]:
        return self._shape.epochs, self._lots * self._shape.global_batch_size

    def _map(self, name: str, dtype: np.dtype, done: int) -> np.memmap:
        is_views = name == _PART
        grid = (self._grid[0], len(self._ids)) if is_views else self._grid
        mode = "r+" if done else "w+"
        return np.memmap(self._out / name, dtype, mode=mode, shape=grid)

    def _collect_lot(self, lot: int, views: np.memmap, rows: np.memmap) -> None:
        size = self._shape.global_batch_size
        part = range(lot * size, min((lot + 1) * size, len(self._ids)))
        found, answers = self._files.read([self._ids[number] for number in part])
        views[:, part.start : part.stop] = found
        indices = torch.arange(part.start, part.stop)
        for epoch in range(self._shape.epochs):
            packed = pack_rows([answers[epoch]], self._shape, indices)
            ((most, total, count),) = measure_errors(packed, [answers[epoch]], self._shape)
            ((before, sum_before, count_before),) = self._errors[epoch]
            self._errors[epoch] = [(max(before, most), sum_before + total, count_before + count)]
            rows[epoch, part.start : part.stop] = packed

    def _read_progress(self) -> int:
        """Lots that are collected, with their errors; refuses those of other files."""
        path = self._out / _PROGRESS
        if not path.is_file():
            return 0
        told = json.loads(path.read_text(encoding="utf-8"))
        if told["identity"] != self._files.identity or len(told["errors"]) != self._shape.epochs:
            raise UserError(
                f"--out ({str(self._out)!r}) holds a part of other published files; name another "
                "directory"
            )
        self._errors = [[tuple(one) for one in errors] for errors in told["errors"]]
        return told["lots"]

    def _note_progress(self, lots: int) -> None:
        told = {"identity": self._files.identity, "lots": lots, "errors": self._errors}
        write_atomically(self._out / _PROGRESS, json.dumps(told))

    def _name_views(self) -> None:
        """The views get their name, and after it what tells of them."""
        part, path = self._out / _PART, self._out / VIEWS
        if part.is_file():
            sync_file(part)
            part.replace(path)
        crc, form = compute_crc32c(path), self._files.form
        words = json.dumps([asdict(form), crc]).encode()
        digest = hashlib.blake2b(words, digest_size=8).hexdigest()
        facts = ViewFacts(form, self._shape.epochs, len(self._ids), crc, digest)
        text = json.dumps(describe_views(facts), indent=2) + "\n"
        LocalFolder(self._out).write_text(VIEWS_JSON, text)


# ---- whether they are these images' answers


def judge(job: Job, out: Path) -> dict[str, float | str]:
    """Top-1 of the answers on some batches of the run; reads their images, as a student will.

    Raises:
      UserError: they know no more of the labels than chance.
    """
    data = job.config.data
    known = job.config.model.known_sizes
    loader = create_loader(data, "train", seed=job.config.train.seed, known=known)
    cache = TeacherCache(out, batch=data.global_batch_size)
    right = total = 0
    try:
        for step, batch in zip(
            range(min(_JUDGED_BATCHES, loader.batches_per_epoch)), loader.batches(), strict=False
        ):
            best = cache.read(step, batch.indices)["cache_indices0"][:, 0]
            right += int((best == batch.labels).sum())
            total += len(best)
    finally:
        cache.close()
        loader.close()
    classes = job.stream["num_classes"]
    limit = 1 / classes + 3 * ((1 - 1 / classes) / classes / total) ** 0.5
    if right <= limit * total:
        raise UserError(
            f"the answers name the label of {right} of {total} examples of data.train_split, no "
            "more than chance: their files belong to other examples; say by --ids whose they are"
        )
    split = re.sub(r"\s", "", data.train_split)
    return {"top1": 100.0 * right / total, "examples": total, "split": f"{split} as imported"}
