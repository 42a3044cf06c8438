"""Stores the answers of a run's teachers, step by step."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from datasets import Batch
from engine import map_batches
from job.build import Parts, build_parts
from job.check import check
from job.lineage import find_lineage
from job.replica import sum_over
from job.spec import Job, with_input_processes
from job.stream import iterate_batches
from models.teachers.teacher import SELVES, get_teacher_sections
from store.lineage.ancestors import LINEAGE_FILE, format_note
from tasks.teachers.cache.manifest import MANIFEST, describe_classes, get_file_name, write_manifest
from tasks.teachers.cache.rows import (
    CLASSES,
    CacheShape,
    Column,
    measure_errors,
    pack_rows,
)
from tasks.teachers.cache.writer import CacheWriter
from tasks.teachers.teaching import create_columns
from tools.cache.card import JUDGED, read_judged, write_card
from tools.cache.shelf import Shelf
from utils.config.load import RunConfig, change, load_config
from utils.errors import UserError
from utils.log import setup_logging
from utils.programs import get_run_flags
from utils.runtime.launcher import launch
from utils.storage.folder import Folder
from utils.storage.local import LocalFolder, write_atomically

if TYPE_CHECKING:
    from torch import Tensor

    from utils.runtime.base import Runtime

IMAGENET_EXAMPLES, IMAGENET_EPOCHS = 1_281_167, 300
_USUAL_TOP_K = 16


def cache(options: argparse.Namespace) -> int:
    """Check the configuration and run the teachers on the configured runtime."""
    if options.augmentations and options.epochs:  # then it is the run's own flag
        options.rest.append(f"--epochs={options.epochs}")
    config = load_config(get_run_flags(options))
    shelf = Shelf(options.out or config.distill.teacher_cache)
    _require_one_answer(config)
    config = without_cache(config)
    job = check(config)
    shape = get_shape(options, job)
    part = _read_part(options.part)
    print_plan(shape, shelf.folder)
    if not options.plan:
        is_reused = options.augmentations is not None
        launch(config.runtime, store, job, CacheTarget(shelf.folder.place, shape, is_reused, part))
    return 0


def _read_part(text: str) -> tuple[int, int]:
    """Which of how many shares of the epochs."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    part = (int(found[1]), int(found[2])) if found else (0, 0)
    if not part[0] < part[1]:
        raise UserError(f"--part ({text!r}) must be I/N with I from 0 to N - 1, as 0/4")
    return part


def _require_one_answer(config: RunConfig) -> None:
    """Refuse a run without teachers, or with answers that cannot be stored."""
    teachers = get_teacher_sections(config.distill)
    if not teachers:
        raise UserError("distill.teacher is empty; name the teacher whose answers are to be stored")
    for teacher in teachers:
        if teacher.keep_tokens or teacher.size == "student":
            raise UserError(
                "distill.teachers keep_tokens and size=student follow the student; leave them out "
                "where answers are stored"
            )
        if teacher.model in SELVES:
            raise UserError(
                f"distill.teacher {teacher.model!r} changes with the student; it cannot be stored"
            )


def without_cache(config: RunConfig) -> RunConfig:
    """The live teachers that the cache will stand in for, taught by a loss that any of them fits.

    The run's own losses may work on stored answers alone.
    """
    taught = {"teacher_cache": "", "loss": "kd", "losses": (), "ensemble": "probs"}
    if config.train.task == "distil":  # its terms say which features are looked at
        taught = {"teacher_cache": ""}
    return change(
        config,
        distill=taught,
        run={"resume": "", "run_id": "", "eval_only": False},
    )


def get_shape(options: argparse.Namespace, job: Job) -> CacheShape:
    """Sizes of the cache to make."""
    batch, steps, total = job.config.data.global_batch_size, job.steps_per_epoch, job.total_steps
    wanted = _read_epochs(options)
    part = total if wanted is None and total % steps else None
    return CacheShape(_get_columns(options, job), wanted or -(-total // steps), steps, batch, part)


def _read_epochs(options: argparse.Namespace) -> int | None:
    """Epochs that the flags want; none: as many as the run has."""
    for flag in ("augmentations", "epochs"):
        value = getattr(options, flag)
        if value is not None and value < 1:
            raise UserError(f"--{flag} ({value}) must be at least 1")
    return options.augmentations or options.epochs


def _get_columns(options: argparse.Namespace, job: Job) -> tuple[Column, ...]:
    """What is stored of each teacher."""
    forms, top_k = job.facts.answers, options.top_k
    classes = min((form.width for form in forms if form.kind == CLASSES), default=None)
    if top_k is not None and classes is None:
        raise UserError(f"--top-k ({top_k}) means nothing to features, which are stored whole")
    if top_k is not None and not 1 <= top_k <= classes:
        raise UserError(f"--top-k ({top_k}) must lie between 1 and {classes}")
    return create_columns(job.config.distill, forms, top_k or _USUAL_TOP_K, options.dtype)


def print_plan(shape: CacheShape, folder: Path | Folder) -> None:
    """Sizes before anything is stored, and what ImageNet would take at this k."""
    row = shape.row_dtype.itemsize
    columns = tuple(
        dataclasses.replace(one, width=max(one.width, 1000)) if one.top_k else one
        for one in shape.columns
    )
    per_image = dataclasses.replace(shape, columns=columns).row_dtype.itemsize
    total = per_image * IMAGENET_EXAMPLES * IMAGENET_EPOCHS / 2**30
    print(
        f"{folder}: {_describe_length(shape)} x {shape.global_batch_size} examples, {row} bytes "
        f"each = {shape.total_bytes / 2**20:.1f} MiB"
    )
    if any(column.places for column in shape.columns):
        return
    counts = sorted({column.top_k for column in shape.columns if column.top_k})
    at_k = f" at k = {', '.join(map(str, counts))}" if counts else ""
    print(
        f"ImageNet x {IMAGENET_EPOCHS} epochs{at_k}: {per_image} bytes an example-epoch, "
        f"{total:,.0f} GiB"
    )


def _describe_length(shape: CacheShape) -> str:
    if shape.steps is not None:
        return f"{shape.steps} steps"
    return f"{shape.epochs} epochs x {shape.steps_per_epoch} steps"


@dataclass(frozen=True)
class CacheTarget:
    """What is stored, and where.

    Args:
      is_reused: runs of any length start over with it.
      part: which of how many shares of the epochs.
    """

    place: str | Path
    shape: CacheShape
    is_reused: bool = False
    part: tuple[int, int] = (0, 1)


def store(runtime: Runtime, job: Job, target: CacheTarget) -> None:
    """Ask the teachers about every step of every epoch that is not yet stored."""
    setup_logging(runtime.ranks.index, runtime.ranks.size)
    shard = (runtime.ranks.index, runtime.ranks.size)
    shelf, shape = Shelf(target.place), target.shape
    folder = shelf.path
    parts = build_parts(runtime, job)
    judged = parts.task.evaluate_teachers(sum_over(runtime, parts))
    if runtime.ranks.is_writer:
        stream = with_input_processes(job.stream, runtime.ranks.size)
        shelf.prepare((MANIFEST, JUDGED))
        write_manifest(
            folder,
            stream,
            shape,
            runtime.ranks.size,
            is_reused=target.is_reused,
            further=describe_classes(job.facts.class_names),
        )
        write_atomically(folder / LINEAGE_FILE, format_note(find_lineage(job, judged)))
        _note_judged(folder, job, judged)
        shelf.send((MANIFEST, LINEAGE_FILE, JUDGED))
    runtime.ranks.barrier("manifest")
    folder.mkdir(parents=True, exist_ok=True)  # of another host
    is_shown = runtime.ranks.is_writer and sys.stderr.isatty()
    bar = tqdm(total=shape.total_steps, unit="step", disable=not is_shown)
    began, rows = time.perf_counter(), shape.global_batch_size // shard[1]
    try:
        for epoch in range(target.part[0], shape.epochs, target.part[1]):
            name = get_file_name(epoch, *shard)
            size = shape.row_dtype.itemsize * shape.count_steps(epoch) * rows
            if shelf.take(name, size):
                bar.update(shape.count_steps(epoch))
                continue
            writer = CacheWriter(folder, shape, epoch, shard)
            bar.update(writer.steps_done)
            if not writer.is_complete:
                store_epoch(runtime, parts, writer, shape, epoch, bar)
            shelf.send((name, f"{name[:-4]}.json"), keep=False)
    finally:
        bar.close()
        parts.close()
    runtime.ranks.barrier("stored")
    if runtime.ranks.is_writer:
        write_card(shelf.folder)
        names = [name for name in shelf.folder.list_names() if name.endswith(".bin")]
        size = sum(map(shelf.folder.get_size, names)) / 2**20
        print(f"stored {size:.1f} MiB in {time.perf_counter() - began:.0f} s: {shelf.folder}")


def _note_judged(folder: Path, job: Job, judged: list[dict[str, float]]) -> None:
    """Keep what the teachers know of the evaluation split, by their hashes."""
    hashes = job.facts.teachers[: len(judged)]
    found = {
        name: {**metrics, "split": job.config.data.eval_split}
        for name, metrics in zip(hashes, judged, strict=True)
    }
    known = {**read_judged(LocalFolder(folder)), **found}
    if known:
        LocalFolder(folder).write_text(JUDGED, json.dumps(known, indent=2) + "\n")


def store_epoch(
    runtime: Runtime, parts: Parts, writer: CacheWriter, shape: CacheShape, epoch: int, bar: tqdm
) -> None:
    """The steps of one epoch that are missing; what is done stays, whatever happens."""

    def ask(batch: Batch) -> tuple[Tensor, ...]:
        return parts.task.compute_cached_outputs(batch, shape.columns)

    first = epoch * shape.steps_per_epoch + writer.steps_done
    asked = map_batches(ask, iterate_batches(parts, first), runtime)
    try:
        with contextlib.closing(asked):
            while not writer.is_complete:
                batch, answers = next(asked)
                values = [runtime.fetch(answer) for answer in answers]
                rows = pack_rows(values, shape, runtime.fetch(batch.indices))
                writer.append(rows, measure_errors(rows, values, shape))
                bar.update(1)
    finally:
        writer.flush()
