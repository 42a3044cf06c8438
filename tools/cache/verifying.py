"""What a cache holds, and whether it is what was written."""

from __future__ import annotations

import argparse
import contextlib
import json
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine import map_batches
from job.build import build_parts
from job.check import check
from job.stream import iterate_batches
from tasks.teachers.cache.manifest import is_by_example, read_manifest, read_shape
from tasks.teachers.cache.reader import TeacherCache
from tasks.teachers.cache.rows import unpack_values
from tools.cache.card import format_card, make_card
from tools.cache.damage import find_damage
from tools.cache.writing import without_cache
from utils.config.load import change, load_config
from utils.errors import UserError
from utils.programs import get_run_flags
from utils.runtime.launcher import create_runtime
from utils.storage.places import open_folder

if TYPE_CHECKING:
    from torch import Tensor

    from datasets import Batch
    from job.spec import Job
    from tasks.teachers.cache.rows import Column
    from utils.runtime.base import Runtime

EXIT_DAMAGED = 1


def show(options: argparse.Namespace) -> int:
    """Print the card."""
    card = make_card(options.cache)
    print(
        json.dumps(card, indent=2)
        if options.json
        else format_card(card, open_folder(options.cache).name)
    )
    return 0


def verify(options: argparse.Namespace) -> int:
    """Print each file that is not what was written; gives the exit code."""
    if options.rest and not options.config:
        raise UserError(
            f"{options.rest[0]} is a key of a run's configuration; name the run by --config"
        )
    if options.steps < 1:
        raise UserError(f"--steps ({options.steps}) must be at least 1")
    if options.workers < 1:
        raise UserError(f"--workers ({options.workers}) must be at least 1")
    faults = find_damage(options.cache, options.workers)
    for fault in faults:
        print(fault)
    if faults:
        return EXIT_DAMAGED
    print(f"{options.cache}: all files are what was written")
    return ask_again(options) if options.config else 0


def ask_again(options: argparse.Namespace) -> int:
    """Ask the run's teachers about batches spread over the cache; gives the exit code."""
    if is_by_example(read_manifest(options.cache)):
        raise UserError(
            f"{options.cache!r} was imported, and its teachers are not here to be asked again; "
            "verify it without --config"
        )
    config = load_config(get_run_flags(options))
    job = check(change(config, distill={"teacher_cache": options.cache, "cache_end": "cycle"}))
    live = check(without_cache(config))
    manifest = read_manifest(options.cache)
    chosen = TeacherCache(options.cache, teachers=job.facts.teachers)
    if any("+" in column.teacher for column in chosen.columns):
        raise UserError(
            f"{options.cache!r} holds several teachers as one answer, of which none can be asked "
            "again; verify it without --config"
        )
    total = read_shape(manifest).total_steps
    steps = sorted({int(step) for step in np.linspace(0, total - 1, min(options.steps, total))})
    found = _compare(create_runtime(config.runtime), live, chosen, steps)
    return _judge(options, chosen, found)


def _compare(
    runtime: Runtime, job: Job, cache: TeacherCache, steps: list[int]
) -> list[list[float]]:
    """Mean differences of each column, for each of some steps."""
    parts = build_parts(runtime, job)
    found: list[list[float]] = [[] for _ in cache.columns]

    def ask(batch: Batch) -> tuple[Tensor, ...]:
        return parts.task.compute_cached_outputs(batch, cache.columns)

    try:
        for step in steps:
            asked = map_batches(ask, iterate_batches(parts, step), runtime)
            with contextlib.closing(asked):
                batch, answers = next(asked)
            cache.read(step, runtime.fetch(batch.indices))  # answers to other examples are refused
            rows = cache.read_rows(step)
            for number, (column, answer) in enumerate(zip(cache.columns, answers, strict=True)):
                stored = unpack_values(rows, cache.numbers[number], column)
                gap = np.abs(stored - _take(column, runtime.fetch(answer)))
                found[number].append(float(gap.mean()))
    finally:
        parts.close()
    return found


def _take(column: Column, answer: Tensor) -> np.ndarray:
    kept = answer[..., : column.top_k] if column.top_k else answer
    return kept.to(torch.float32).numpy()


def _judge(options: argparse.Namespace, cache: TeacherCache, found: list[list[float]]) -> int:
    """Print how far the second answers lie from the stored ones; gives the exit code."""
    noted = {
        one["hash"] + one["part"]: one["mean_error"] for one in make_card(options.cache)["teachers"]
    }
    code = 0
    for column, gaps in zip(cache.columns, found, strict=True):
        allowed = (noted[column.teacher + column.part] or 0.0) + options.tolerance
        is_good = max(gaps) <= allowed
        print(
            f"{column.name or column.teacher}: asked again about {len(gaps)} batches, mean "
            f"difference up to {max(gaps):.2g}, {'within' if is_good else 'beyond'} {allowed:.2g}"
        )
        code = code if is_good else EXIT_DAMAGED
    return code
