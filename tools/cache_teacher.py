"""Ask a run's teachers once and store their answers for training.

The stream of examples (order, crop, flip, mixup; windows of text) is a function of seed, epoch and
position, so the stored answers are those that a live teacher would give. `--plan` says what it will
take.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from utils.config import RunConfig, change, load_config
from utils.errors import UserError
from utils.log import setup_logging
from utils.programs import create_program_parser, run_program
from utils.storage import LocalFolder, open_folder

if TYPE_CHECKING:
    from torch import Tensor
    from tqdm import tqdm

    from datasets import Batch
    from job.build import Parts
    from job.spec import Job
    from tasks.teacher_cache import CacheShape, CacheWriter
    from utils.runtime.base import Runtime

IMAGENET_EXAMPLES, IMAGENET_EPOCHS = 1_281_167, 300


def main(argv: list[str] | None = None) -> int:
    """Parse flags, store what is missing; gives the exit code."""
    setup_logging()
    interrupted = "interrupted; the same command continues"
    return run_program(lambda: cache(*parse_arguments(argv)), interrupted=interrupted)


def parse_arguments(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The tool's own flags, and the rest, which are keys of the run's configuration."""
    parser = create_program_parser(
        __doc__,
        prog="python -m tools.cache_teacher",
        epilog="All other flags are keys of the run's configuration, as for main.py.",
    )
    parser.add_argument("--config", required=True, help="YAML of the run that will be taught")
    parser.add_argument("--out", default="", help="cache directory; none: distill.teacher_cache")
    parser.add_argument("--epochs", type=int, help="epochs to store; none: as the run is long")
    parser.add_argument("--top-k", type=int, help="classes to store; none: 16, or all if fewer")
    parser.add_argument("--plan", action="store_true", help="print sizes and stop")
    return parser.parse_known_args(argv)


def cache(options: argparse.Namespace, rest: list[str]) -> int:
    """Check the configuration and run the teachers on the configured runtime."""
    from job.check import check
    from utils.runtime import launch

    config = load_config(["--config", options.config, *rest])
    folder = get_folder(options.out or config.distill.teacher_cache)
    _require_one_answer(config)
    config = without_cache(config)
    job = check(config)
    shape = get_shape(options, job)
    print_plan(shape, folder)
    if not options.plan:
        launch(config.runtime, store, job, shape, folder)
    return 0


def _require_one_answer(config: RunConfig) -> None:
    """Refuse a run without teachers, or with answers that cannot be stored."""
    from models import EMA, get_teacher_sections

    teachers = get_teacher_sections(config.distill)
    if not teachers:
        raise UserError("distill.teacher is empty; name the teacher whose answers are to be stored")
    if EMA in (teacher.model for teacher in teachers):
        raise UserError("distill.teacher 'ema' changes with the student; it cannot be stored")
    if config.distill.ensemble == "separate" and len(teachers) > 1:
        raise UserError(
            "distill.ensemble 'separate' keeps several answers; a cache stores one: use probs or "
            "logits"
        )


def get_folder(place: str) -> Path:
    """The directory of this machine in which the answers are stored."""
    if not place:
        raise UserError("--out is missing and distill.teacher_cache is empty; name a directory")
    folder = open_folder(place)
    if not isinstance(folder, LocalFolder):
        raise UserError(
            f"--out ({place!r}) is a URL; store into a directory and copy it there, from where "
            "distill.teacher_cache replays it"
        )
    return folder.path


def without_cache(config: RunConfig) -> RunConfig:
    """The live teachers that the cache will stand in for, taught by a loss that any of them fits.

    The run's own losses may work on stored answers alone.
    """
    return change(
        config,
        distill={"teacher_cache": "", "loss": "kd", "losses": ()},
        run={"resume": "", "run_id": "", "eval_only": False},
    )


def get_shape(options: argparse.Namespace, job: Job) -> CacheShape:
    """Sizes of the cache to make."""
    from tasks.teacher_cache import CacheShape

    classes, places = job.facts.answers
    top_k = min(16, classes) if options.top_k is None else options.top_k
    if not 1 <= top_k <= classes:
        raise UserError(f"--top-k ({top_k}) must lie between 1 and {classes}")
    if options.epochs is not None and options.epochs < 1:
        raise UserError(f"--epochs ({options.epochs}) must be at least 1")
    batch, steps, total = job.config.data.global_batch_size, job.steps_per_epoch, job.total_steps
    epochs = options.epochs or -(-total // steps)
    part = total if options.epochs is None and total % steps else None
    return CacheShape(top_k, classes, epochs, steps, batch, places, part)


def print_plan(shape: CacheShape, folder: Path) -> None:
    """Sizes before anything is stored, and what ImageNet would take at this k."""
    row = shape.row_dtype.itemsize
    imagenet = dataclasses.replace(shape, num_classes=max(shape.num_classes, 1000))
    per_image = imagenet.row_dtype.itemsize
    total = per_image * IMAGENET_EXAMPLES * IMAGENET_EPOCHS / 2**30
    print(
        f"{folder}: {_describe_length(shape)} x {shape.global_batch_size} examples, {row} bytes "
        f"each = {shape.total_bytes / 2**20:.1f} MiB"
    )
    if shape.places:
        return
    print(
        f"ImageNet x {IMAGENET_EPOCHS} epochs at k = {shape.top_k}: {per_image} bytes an "
        f"example-epoch, {total:,.0f} GiB"
    )


def _describe_length(shape: CacheShape) -> str:
    if shape.steps is not None:
        return f"{shape.steps} steps"
    return f"{shape.epochs} epochs x {shape.steps_per_epoch} steps"


def store(runtime: Runtime, job: Job, shape: CacheShape, folder: Path) -> None:
    """Ask the teachers about every step of every epoch that is not yet stored."""
    from tqdm import tqdm

    from job.build import build_parts
    from job.spec import with_input_processes
    from tasks.teacher_cache import CacheWriter, write_manifest

    setup_logging(runtime.ranks.index, runtime.ranks.size)
    shard = (runtime.ranks.index, runtime.ranks.size)
    parts = build_parts(runtime, job)
    if runtime.ranks.is_writer:
        stream = with_input_processes(job.stream, runtime.ranks.size)
        write_manifest(folder, stream, job.facts.teachers, shape, runtime.ranks.size)
    runtime.ranks.barrier("manifest")
    is_shown = runtime.ranks.is_writer and sys.stderr.isatty()
    bar = tqdm(total=shape.total_steps, unit="step", disable=not is_shown)
    began = time.perf_counter()
    try:
        for epoch in range(shape.epochs):
            writer = CacheWriter(folder, shape, epoch, shard)
            bar.update(writer.steps_done)
            if not writer.is_complete:
                store_epoch(runtime, parts, writer, shape, epoch, bar)
    finally:
        bar.close()
        parts.close()
    if runtime.ranks.is_writer:
        size = sum(path.stat().st_size for path in folder.glob("*.bin")) / 2**20
        print(f"stored {size:.1f} MiB in {time.perf_counter() - began:.0f} s: {folder}")


def store_epoch(
    runtime: Runtime, parts: Parts, writer: CacheWriter, shape: CacheShape, epoch: int, bar: tqdm
) -> None:
    """The steps of one epoch that are missing; what is done stays, whatever happens."""
    from engine import map_batches
    from job.stream import iterate_batches

    def ask(batch: Batch) -> Tensor:
        return parts.task.ask_to_store(batch, shape.top_k)

    first = epoch * shape.steps_per_epoch + writer.steps_done
    asked = map_batches(ask, iterate_batches(parts, first), runtime)
    try:
        with contextlib.closing(asked):
            while not writer.is_complete:
                batch, answers = next(asked)
                values, examples = runtime.fetch(answers), runtime.fetch(batch.indices)
                writer.append(parts.task.pack_stored(values, shape, examples))
                bar.update(1)
    finally:
        writer.flush()


if __name__ == "__main__":
    sys.exit(main())
