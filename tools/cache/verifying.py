"""Shows a cache, and compares it with what was written and with its teachers."""

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
from tasks.protocol import Caches
from tasks.teachers.cache.manifest import is_by_example, read_manifest, read_shape
from tasks.teachers.cache.reader import TeacherCache
from tasks.teachers.cache.rows import unpack_values
from tools.cache.card import format_card, make_card
from tools.cache.damage import find_damage
from tools.cache.writing import without_cache
from utils.config.load import change, load_config
from utils.errors import EXIT_FAILED, UserError
from utils.programs import get_run_flags, require_at_least
from utils.runtime.launcher import create_runtime
from utils.storage.places import open_folder

if TYPE_CHECKING:
    from torch import Tensor

    from datasets import Batch
    from job.spec import Job
    from utils.runtime.base import Runtime


def show(options: argparse.Namespace) -> None:
    """Print the card."""
    card = make_card(options.cache)
    name = open_folder(options.cache).name
    print(json.dumps(card, indent=2) if options.json else format_card(card, name))


def verify(options: argparse.Namespace) -> int:
    """Print each file that differs from what was written; return the exit code."""
    if options.rest and not options.config:
        raise UserError(
            f"{options.rest[0]} is a key of a run's configuration; name the run by --config"
        )
    require_at_least(1, options, "steps", "workers")
    faults = find_damage(options.cache, options.workers)
    for fault in faults:
        print(fault)
    if faults:
        return EXIT_FAILED
    print(f"{options.cache}: all files are what was written")
    return compare_with_teachers(options) if options.config else 0


def compare_with_teachers(options: argparse.Namespace) -> int:
    """Run the teachers on batches spread over the cache; print mean differences.

    Returns:
      The exit code, 1 if one exceeds the noted mean error and the tolerance.
    """
    manifest = read_manifest(options.cache)
    if is_by_example(manifest):
        raise UserError(
            f"{options.cache!r} was imported, and its teachers are not available; verify it "
            "without --config"
        )
    config = load_config(get_run_flags(options))
    job = check(change(config, distill={"teacher_cache": options.cache, "cache_end": "cycle"}))
    live = check(without_cache(config))
    cache = TeacherCache(options.cache, teachers=job.facts.teachers)
    if any("+" in column.teacher for column in cache.columns):
        raise UserError(
            f"{options.cache!r} holds several teachers combined into one output, which none of "
            "them can compute alone; verify it without --config"
        )
    total = read_shape(manifest).total_steps
    steps = sorted({int(step) for step in np.linspace(0, total - 1, min(options.steps, total))})
    gaps = _measure_gaps(create_runtime(config.runtime), live, cache, steps)
    noted = {row["hash"] + row["part"]: row for row in make_card(options.cache)["teachers"]}
    code = 0
    for column, means in zip(cache.columns, gaps, strict=True):
        mean_error = noted[column.teacher + column.part]["mean_error"] or 0.0
        allowed = mean_error + options.tolerance
        is_good = max(means) <= allowed
        print(
            f"{column.name or column.teacher}: asked again about {len(means)} batches, mean "
            f"difference up to {max(means):.2g}, {'within' if is_good else 'beyond'} {allowed:.2g}"
        )
        code = code if is_good else EXIT_FAILED
    return code


def _measure_gaps(
    runtime: Runtime, job: Job, cache: TeacherCache, steps: list[int]
) -> list[list[float]]:
    """Compute the mean absolute differences of each column for each of some steps."""
    parts = build_parts(runtime, job)
    gaps: list[list[float]] = [[] for _ in cache.columns]

    def compute(batch: Batch) -> tuple[Tensor, ...]:
        assert isinstance(parts.task, Caches)
        return parts.task.compute_cached_outputs(batch, cache.columns)

    try:
        for step in steps:
            results = map_batches(compute, iterate_batches(parts, step), runtime)
            with contextlib.closing(results):
                batch, outputs = next(results)
            cache.read(step, runtime.fetch(batch.indices))  # refuses outputs for other examples
            rows = cache.read_rows(step)
            for number, (column, output) in enumerate(zip(cache.columns, outputs, strict=True)):
                stored = unpack_values(rows, cache.numbers[number], column)
                live = runtime.fetch(output)[..., : column.top_k or None].to(torch.float32).numpy()
                gaps[number].append(float(np.abs(stored - live).mean()))
    finally:
        parts.close()
    return gaps
