"""Stores the outputs of a run's teachers, step by step."""

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
from typing import TYPE_CHECKING, NoReturn

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
from tasks.protocol import Caches, Distils
from tasks.teachers.cache.manifest import MANIFEST, describe_classes, get_file_name, write_manifest
from tasks.teachers.cache.rows import CLASSES, CacheShape, Column, measure_errors, pack_rows
from tasks.teachers.cache.writer import CacheWriter
from tasks.teachers.teaching import create_columns
from tools.cache.card import SCORES, get_facts_name, read_scores, write_card
from tools.cache.directory import CacheDirectory
from utils.config.load import RunConfig, change, load_config
from utils.errors import UserError
from utils.log import setup_logging
from utils.programs import get_run_flags, require_at_least
from utils.runtime.launcher import launch
from utils.storage.folder import Folder
from utils.storage.local import LocalFolder, write_atomically

if TYPE_CHECKING:
    from torch import Tensor

    from utils.runtime.base import Runtime

IMAGENET_EXAMPLES, IMAGENET_EPOCHS = 1_281_167, 300
_DEFAULT_TOP_K = 16


def cache(options: argparse.Namespace) -> None:
    """Check the configuration and run the teachers on the configured runtime."""
    if options.augmentations and options.epochs:  # then it is the run's own flag
        options.rest.append(f"--epochs={options.epochs}")
    config = load_config(get_run_flags(options))
    directory = CacheDirectory(options.out or config.distill.teacher_cache)
    _check_teachers(config)
    config = without_cache(config)
    job = check(config)
    shape = get_shape(options, job)
    match = re.fullmatch(r"(\d+)/(\d+)", options.part)
    part = (int(match[1]), int(match[2])) if match else (0, 0)
    if not part[0] < part[1]:
        raise UserError(f"--part ({options.part!r}) must be I/N with I from 0 to N - 1, as 0/4")
    print_plan(shape, directory.folder)
    if not options.plan:
        is_reused = options.augmentations is not None
        target = CacheTarget(directory.folder.place, shape, is_reused, part)
        launch(config.runtime, store, job, target, own_code=config.run.own_code)


def _check_teachers(config: RunConfig) -> None:
    """Refuse a run without teachers, or with outputs that cannot be stored."""
    teachers = get_teacher_sections(config.distill)
    if not teachers:
        raise UserError("distill.teacher is empty; name the teacher whose outputs are to be stored")
    for teacher in teachers:
        if teacher.keep_tokens or teacher.size == "student":
            raise UserError(
                "distill.teachers keep_tokens and size=student follow the student, so these "
                "outputs cannot be stored; remove them"
            )
        if teacher.model in SELVES:
            raise UserError(
                f"distill.teacher {teacher.model!r} changes with the student, so its outputs "
                "cannot be stored; use another teacher"
            )


def without_cache(config: RunConfig) -> RunConfig:
    """Return the configuration with the live teachers and a loss that fits any of them.

    The run's own losses may work on stored outputs only.
    """
    distill = {"teacher_cache": "", "loss": "kd", "losses": (), "ensemble": "probs"}
    if config.train.task == "distil":  # its losses decide which features are computed
        distill = {"teacher_cache": ""}
    return change(config, distill=distill, run={"resume": "", "run_id": "", "eval_only": False})


def get_shape(options: argparse.Namespace, job: Job) -> CacheShape:
    """Compute the sizes of the cache from the flags and the run."""
    require_at_least(1, options, "augmentations", "epochs")
    batch, steps, total = job.config.data.global_batch_size, job.steps_per_epoch, job.total_steps
    epochs = options.augmentations or options.epochs
    part = total if epochs is None and total % steps else None
    return CacheShape(_get_columns(options, job), epochs or -(-total // steps), steps, batch, part)


def _get_columns(options: argparse.Namespace, job: Job) -> tuple[Column, ...]:
    forms, top_k = job.facts.answers, options.top_k
    classes = min((form.width for form in forms if form.kind == CLASSES), default=None)
    if top_k is not None and classes is None:
        raise UserError(
            f"--top-k ({top_k}) is not supported with features, which are stored whole; remove it"
        )
    if top_k is not None and not 1 <= top_k <= classes:
        raise UserError(f"--top-k ({top_k}) must lie between 1 and {classes}")
    return create_columns(job.config.distill, forms, top_k or _DEFAULT_TOP_K, options.dtype)


def print_plan(shape: CacheShape, folder: Path | Folder) -> None:
    """Print the sizes of the cache, and those for ImageNet with this k."""
    row = shape.row_dtype.itemsize
    length = f"{shape.epochs} epochs x {shape.steps_per_epoch} steps"
    if shape.steps is not None:
        length = f"{shape.steps} steps"
    print(
        f"{folder}: {length} x {shape.global_batch_size} examples, {row} bytes each = "
        f"{shape.total_bytes / 2**20:.1f} MiB"
    )
    if any(column.places for column in shape.columns):
        return
    columns = tuple(
        dataclasses.replace(column, width=max(column.width, 1000)) if column.top_k else column
        for column in shape.columns
    )
    per_image = dataclasses.replace(shape, columns=columns).row_dtype.itemsize
    total = per_image * IMAGENET_EXAMPLES * IMAGENET_EPOCHS / 2**30
    counts = sorted({column.top_k for column in shape.columns if column.top_k})
    at_k = f" at k = {', '.join(map(str, counts))}" if counts else ""
    print(
        f"ImageNet x {IMAGENET_EPOCHS} epochs{at_k}: {per_image} bytes an example-epoch, "
        f"{total:,.0f} GiB"
    )


@dataclass(frozen=True)
class CacheTarget:
    """Shape and destination of a cache.

    Args:
      is_reused: runs of any length start over with it.
      part: I of N: the epochs I, I + N, ... are stored.
    """

    place: str | Path
    shape: CacheShape
    is_reused: bool = False
    part: tuple[int, int] = (0, 1)


def store(runtime: Runtime, job: Job, target: CacheTarget) -> None:
    """Run the teachers on every step of every epoch that is not yet stored."""
    ranks = runtime.ranks
    setup_logging(ranks.index, ranks.size)
    directory, shape = CacheDirectory(target.place), target.shape
    parts = build_parts(runtime, job)
    assert isinstance(parts.task, Distils)
    scores = parts.task.evaluate_teachers(sum_over(runtime, parts))
    if ranks.is_writer:
        _write_heads(directory, job, target, scores, ranks.size)
    ranks.barrier("manifest")
    directory.path.mkdir(parents=True, exist_ok=True)  # of another host
    is_shown = ranks.is_writer and sys.stderr.isatty()
    bar = tqdm(total=shape.total_steps, unit="step", disable=not is_shown)
    began, rows = time.perf_counter(), shape.global_batch_size // ranks.size
    try:
        for epoch in range(target.part[0], shape.epochs, target.part[1]):
            name = get_file_name(epoch, ranks.index, ranks.size)
            size = shape.row_dtype.itemsize * shape.count_steps(epoch) * rows
            if directory.take(name, size):
                bar.update(shape.count_steps(epoch))
                continue
            writer = CacheWriter(directory.path, shape, epoch, (ranks.index, ranks.size))
            bar.update(writer.steps_done)
            if not writer.is_complete:
                store_epoch(runtime, parts, writer, shape, epoch, bar)
            directory.send((name, get_facts_name(name)), keep=False)
    finally:
        bar.close()
        parts.close()
    ranks.barrier("stored")
    if ranks.is_writer:
        folder = directory.folder
        write_card(folder)
        names = [name for name in folder.list_names() if name.endswith(".bin")]
        size = sum(map(folder.get_size, names)) / 2**20
        print(f"stored {size:.1f} MiB in {time.perf_counter() - began:.0f} s: {folder}")


def _write_heads(
    directory: CacheDirectory,
    job: Job,
    target: CacheTarget,
    scores: list[dict[str, float]],
    world_size: int,
) -> None:
    """Write the manifest, the teachers' lineage, and their scores on the evaluation split."""
    directory.prepare((MANIFEST, SCORES))
    path, further = directory.path, describe_classes(job.facts.class_names)
    stream = with_input_processes(job.stream, world_size)
    flags = {"is_reused": target.is_reused, "further": further}
    write_manifest(path, stream, target.shape, world_size, **flags)
    write_atomically(path / LINEAGE_FILE, format_note(find_lineage(job, scores)))
    known = read_scores(LocalFolder(path))
    for name, metrics in zip(job.facts.teachers, scores, strict=False):
        known[name] = {**metrics, "split": job.config.data.eval_split}
    if known:
        LocalFolder(path).write_text(SCORES, json.dumps(known, indent=2) + "\n")
    directory.send((MANIFEST, LINEAGE_FILE, SCORES))


def store_epoch(
    runtime: Runtime,
    parts: Parts,
    writer: CacheWriter,
    shape: CacheShape,
    epoch: int,
    bar: tqdm[NoReturn],
) -> None:
    """Store the missing steps of an epoch; stored ones are kept after any error."""

    def compute(batch: Batch) -> tuple[Tensor, ...]:
        assert isinstance(parts.task, Caches)
        return parts.task.compute_cached_outputs(batch, shape.columns)

    first = epoch * shape.steps_per_epoch + writer.steps_done
    results = map_batches(compute, iterate_batches(parts, first), runtime)
    try:
        with contextlib.closing(results):
            while not writer.is_complete:
                batch, outputs = next(results)
                values = [runtime.fetch(output) for output in outputs]
                rows = pack_rows(values, shape, runtime.fetch(batch.indices))
                writer.append(rows, measure_errors(rows, values, shape))
                bar.update(1)
    finally:
        writer.flush()
