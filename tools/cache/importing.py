"""Converts published outputs to a cache: the view of each image, and the teacher's output."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import numpy as np
import torch

from big_vision.input.order import ShardSpec
from big_vision.input.source import Reading
from big_vision.pp.stored_views import VIEWS, VIEWS_JSON, ViewFacts, describe_views
from datasets import ImageBatch, create_loader, create_source
from job.check import check
from store.lineage.ancestors import CACHE, LINEAGE_FILE, Ancestor, format_note
from tasks.teachers.cache.by_example import describe_images, find_views
from tasks.teachers.cache.manifest import (
    BY_EXAMPLE,
    MANIFEST,
    describe_classes,
    read_manifest,
    read_shape,
    write_manifest,
)
from tasks.teachers.cache.reader import TeacherCache
from tasks.teachers.cache.rows import CLASSES, CacheShape, Column, measure_errors, pack_rows
from tasks.teachers.cache.writer import CacheWriter, Errors
from tools.cache.card import SCORES, list_files, write_card
from tools.cache.directory import CacheDirectory
from tools.cache.reinforced import ReinforcedFiles
from tools.cache.seeded import SeededFiles
from utils.config.distill import DistillSection
from utils.config.load import change, load_config
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.programs import get_run_flags
from utils.runtime.launcher import create_runtime
from utils.storage.json_files import write_json
from utils.storage.local import LocalFolder, compute_crc32c, sync_file, write_atomically
from utils.storage.places import open_folder, to_path

if TYPE_CHECKING:
    from big_vision.input.source import Reader
    from job.spec import Job

# Images that are read and stored at a time.
_LOT = 1024
_COLLECTED, _PROGRESS, _PART = "collected.part", "collected.progress", "views.part"
# Lots between two writes of the progress.
_NOTED_LOTS = 20
# Batches on which the outputs are compared with the labels.
_SCORED_BATCHES = 8
_NAMED_BY = ("sorted", "stem")


PublishedFiles = ReinforcedFiles | SeededFiles


def open_published(options: argparse.Namespace, classes: int) -> PublishedFiles:
    """Open the published files of a form; `classes` is the number of the run's dataset."""
    if options.form == "tinyvit":
        return SeededFiles(options.source, options.saved_config, classes)
    return ReinforcedFiles(options.source)


def import_published(options: argparse.Namespace) -> None:
    """Write the cache."""
    directory = CacheDirectory(options.out)
    out = directory.path
    flag = f"--distill.teacher_cache={options.out}"
    config = load_config([*get_run_flags(options), flag])
    create_runtime(config.runtime)  # before TensorFlow
    # The student only: its teacher's cache does not exist yet.
    job = check(change(config, distill=DistillSection().model_dump()))
    _check_run(job, directory)
    files = open_published(options, job.stream["num_classes"])
    if job.stream["num_classes"] != files.width:
        raise UserError(
            f"{options.source!r} holds outputs of {files.width} classes, the run's student has "
            f"{job.stream['num_classes']}; use the dataset that they were published for"
        )
    column = Column(
        files.identity, CLASSES, files.width, files.top_k, dtype=options.dtype, name=files.teacher
    )
    if _is_complete(directory, column):
        print(f"{directory.folder} holds them already")
        return
    ids = find_ids(options, files, job)
    directory.prepare()
    target = _Target(out, files, ids, column)
    target.collect()
    directory.send((VIEWS, VIEWS_JSON))
    target.write(describe_images(job.stream, out), job.facts.class_names)
    write_json(out / SCORES, {files.identity: score(job, out)})
    ancestor = Ancestor(1, CACHE, files.identity, f"{options.form}: {files.teacher}")
    write_atomically(out / LINEAGE_FILE, format_note([ancestor]))
    write_card(out)
    directory.send_all()
    print(f"imported {files.epochs} views of {len(ids)} images: {directory.folder}")


def _is_complete(directory: CacheDirectory, column: Column) -> bool:
    """Return whether a bucket has the whole cache; UserError if it is another cache."""
    if MANIFEST not in directory.folder.list_names():  # it is uploaded last
        return False
    if read_shape(read_manifest(directory.folder)).columns != (column,):
        raise UserError(
            f"--out ({directory.folder.place!r}) holds another cache; use another directory"
        )
    return not isinstance(directory.folder, LocalFolder)


def _check_run(job: Job, directory: CacheDirectory) -> None:
    """Refuse a run that cannot show the views, before anything is read."""
    if "num_classes" not in job.stream or "train_pp" not in job.stream:
        raise UserError(
            "published outputs need images with one class each, which train.task "
            f"({job.config.train.task}) does not have; use train.task=classify"
        )
    place = find_views(job.stream, directory.folder)
    if open_folder(place).place != directory.folder.place:
        raise UserError(
            f"data.train_pp shows the views of {place!r}, but they will be written to --out "
            f"({directory.folder.place!r}); use one directory in both"
        )


def find_ids(options: argparse.Namespace, files: PublishedFiles, job: Job) -> list[str]:
    """Find the published name of each example of the training split, in its order."""
    published = files.list_ids()
    # Only names are read: data.train_pp may show views which do not exist yet.
    data = change(job.config, data={"train_pp": job.config.data.eval_pp}).data
    source = create_source(data, job.config.model.known_sizes)
    spec = ShardSpec(0, 1, data.global_batch_size)
    reader = source.open(source.select("train"), Reading("train", spec, job.config.train.seed))
    with contextlib.closing(reader):
        count = reader.num_examples
        is_numbered = all(name.isdecimal() for name in published)
        rule = options.ids or ("sorted" if is_numbered else "stem")
        ids = _name_examples(rule, reader, count)
    lacking = [name for name in ids if name not in published]
    is_other = rule in _NAMED_BY and len(published) != count
    if len(set(ids)) != count or lacking or is_other:
        example = f", the first without is {lacking[0]!r}" if lacking else ""
        raise UserError(
            f"{options.source!r} holds outputs for {len(published)} images and data.train_split "
            f"has {count} examples of {len(set(ids))} names{example}; use the whole split, or name "
            "the examples by --ids"
        )
    return ids


def _name_examples(rule: str, reader: Reader, count: int) -> list[str]:
    """Return published names by a rule, or from a file."""
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
            f"--ids {rule} needs examples in class folders, but these are called {names[0]!r}; "
            "write the published name of each into a text file, a line each, and name that file by "
            "--ids"
        )
    if rule == "stem":
        return [PurePosixPath(name).stem for name in names]
    order = sorted(range(count), key=lambda number: PurePosixPath(names[number]).parts)
    ranks = {number: str(rank) for rank, number in enumerate(order)}
    return [ranks[number] for number in range(count)]


class _Target:
    """The directory that is written: views and collected rows first, then the epochs' files.

    Rows lie in the order of the examples. Collected lots are not read again after an interruption.
    """

    def __init__(self, out: Path, files: PublishedFiles, ids: list[str], column: Column) -> None:
        self._out, self._files, self._ids = out, files, ids
        lot = min(_LOT, len(ids))
        self._lots = -(-len(ids) // lot)
        self._shape = CacheShape((column,), files.epochs, self._lots, lot)
        self._errors: list[list[Errors]] = [[(0.0, 0.0, 0)] for _ in range(files.epochs)]

    def collect(self) -> None:
        """Write all views, and all outputs as rows, from the published files."""
        done = self._read_progress()
        names = (VIEWS_JSON, *list_files(self._shape, 1))
        if done == 0 and all((self._out / name).is_file() for name in names):
            return
        if done < self._lots:
            (self._out / VIEWS_JSON).unlink(missing_ok=True)
            mode, (epochs, padded) = "r+" if done else "w+", self._grid
            views = np.memmap(
                self._out / _PART, self._files.form.row_dtype, mode, shape=(epochs, len(self._ids))
            )
            rows = np.memmap(
                self._out / _COLLECTED, self._shape.row_dtype, mode, shape=(epochs, padded)
            )
            for lot in range(done, self._lots):
                self._collect_lot(lot, views, rows)
                if (lot + 1) % _NOTED_LOTS == 0 or lot == self._lots - 1:
                    views.flush()
                    rows.flush()
                    self._write_progress(lot + 1)
        self._publish_views()

    def write(self, stream: JsonObject, class_names: Sequence[str] | None) -> None:
        """Write the manifest and each epoch's file."""
        lot = self._shape.global_batch_size
        further = {"layout": BY_EXAMPLE, "examples": len(self._ids), "rows_per_step": lot}
        further |= describe_classes(class_names)
        write_manifest(self._out, stream, self._shape, 1, is_reused=True, further=further)
        collected = self._out / _COLLECTED
        for epoch in range(self._shape.epochs):
            writer = CacheWriter(self._out, self._shape, epoch)
            while not writer.is_complete:
                rows = np.memmap(collected, self._shape.row_dtype, mode="r", shape=self._grid)
                first = writer.steps_done * lot
                # All of an epoch's errors were measured while it was collected.
                errors = self._errors[epoch] if first == 0 else ()
                writer.append(rows[epoch, first : first + lot], errors)
        for name in (_COLLECTED, _PROGRESS):
            (self._out / name).unlink(missing_ok=True)

    @property
    def _grid(self) -> tuple[int, int]:
        return self._shape.epochs, self._lots * self._shape.global_batch_size

    def _collect_lot(self, lot: int, views: np.memmap, rows: np.memmap) -> None:
        size = self._shape.global_batch_size
        part = slice(lot * size, min((lot + 1) * size, len(self._ids)))
        views[:, part], outputs = self._files.read(self._ids[part])
        indices = torch.arange(part.start, part.stop)
        for epoch in range(self._shape.epochs):
            packed = pack_rows([outputs[epoch]], self._shape, indices)
            ((most, total, count),) = measure_errors(packed, [outputs[epoch]], self._shape)
            ((before, sum_before, count_before),) = self._errors[epoch]
            self._errors[epoch] = [(max(before, most), sum_before + total, count_before + count)]
            rows[epoch, part] = packed

    def _read_progress(self) -> int:
        """Read the number of collected lots, and their errors; refuse those of other files."""
        path = self._out / _PROGRESS
        if not path.is_file():
            return 0
        progress = json.loads(path.read_text(encoding="utf-8"))
        errors = progress["errors"]
        if progress["identity"] != self._files.identity or len(errors) != self._shape.epochs:
            raise UserError(
                f"--out ({str(self._out)!r}) holds a part of other published files; use another "
                "directory"
            )
        self._errors = [[tuple(column) for column in epoch] for epoch in errors]
        return progress["lots"]

    def _write_progress(self, lots: int) -> None:
        progress = {"identity": self._files.identity, "lots": lots, "errors": self._errors}
        write_atomically(self._out / _PROGRESS, json.dumps(progress))

    def _publish_views(self) -> None:
        """Rename the file of views, then write its description."""
        part, path = self._out / _PART, self._out / VIEWS
        if part.is_file():
            sync_file(part)
            part.replace(path)
        crc, form = compute_crc32c(path), self._files.form
        words = json.dumps([asdict(form), crc]).encode()
        digest = hashlib.blake2b(words, digest_size=8).hexdigest()
        facts = ViewFacts(form, self._shape.epochs, len(self._ids), crc, digest)
        write_json(self._out / VIEWS_JSON, describe_views(facts))


def score(job: Job, out: Path) -> dict[str, float | str]:
    """Compute the top-1 of the outputs on some batches of the run, with the images decoded.

    Raises:
      UserError: the top-1 is that of chance, so the outputs belong to other images.
    """
    data = job.config.data
    known = job.config.model.known_sizes
    loader = create_loader(data, "train", seed=job.config.train.seed, known=known)
    cache = TeacherCache(out, batch=data.global_batch_size)
    right = total = 0
    with contextlib.closing(cache), contextlib.closing(loader):
        count = min(_SCORED_BATCHES, loader.batches_per_epoch)
        for step, batch in zip(range(count), loader.batches(), strict=False):
            assert isinstance(batch, ImageBatch)
            best = cache.read(step, batch.indices)["cache_indices0"][:, 0]
            right += int((best == batch.labels).sum())
            total += len(best)
    classes = job.stream["num_classes"]
    limit = 1 / classes + 3 * ((1 - 1 / classes) / classes / total) ** 0.5
    if right <= limit * total:
        raise UserError(
            f"the outputs name the label of {right} of {total} examples of data.train_split, no "
            "more than chance: their files belong to other examples; name the examples by --ids"
        )
    split = re.sub(r"\s", "", data.train_split)
    return {"top1": 100.0 * right / total, "examples": total, "split": f"{split} as imported"}
