"""Measures means and variances of teachers' features over training images."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import time
from typing import TYPE_CHECKING

import numpy as np

from engine import map_batches
from job.build import build_parts
from job.check import check
from job.stream import iterate_batches
from tasks.distil.feature_statistics import Moments, describe_source, write_statistics
from utils.config.load import change, load_config
from utils.errors import UserError
from utils.log import setup_logging
from utils.programs import get_run_flags
from utils.runtime.launcher import launch
from utils.storage.places import open_folder

if TYPE_CHECKING:
    from job.build import Parts
    from job.spec import Job
    from tasks.distil.feature_statistics import FeatureStatistics, Moments
    from utils.json_types import JsonObject
    from utils.runtime.base import Runtime

# Enough for a covariance of 1536 pooled features; patches have hundreds of rows an image.


def measure(options: argparse.Namespace) -> int:
    """Check the configuration, ask the teachers on the configured runtime, write the file."""
    config = load_config(get_run_flags(options))
    place = options.out or config.distill.statistics
    if config.train.task != "distil":
        raise UserError(
            f"train.task ({config.train.task}) compares no features of teachers; set distil"
        )
    if not place:
        raise UserError("--out is missing and distill.statistics is empty; name a file")
    if options.images < 2:
        raise UserError(f"--images ({options.images}) gives no variance; give 2 or more")
    open_folder(place).parent.probe()
    config = change(  # the file that is to be made cannot be read yet
        config,
        distill={"standardise": "none", "statistics": ""},
        run={"resume": "", "run_id": "", "eval_only": False},
    )
    job = check(config)
    launch(config.runtime, collect, job, place, options.images, describe_source(config))
    return 0


def collect(runtime: Runtime, job: Job, place: str, images: int, source: JsonObject) -> None:
    """Ask the teachers about this rank's images, merge the ranks' sums and write them."""
    setup_logging(runtime.ranks.index, runtime.ranks.size)
    parts = build_parts(runtime, job)
    began = time.perf_counter()
    batch = job.config.data.global_batch_size
    steps = min(-(-images // batch), job.steps_per_epoch)
    try:
        own = look_at_images(runtime, parts, steps)
    finally:
        parts.close()
    found = merge_ranks(runtime.ranks.gather(own))
    if runtime.ranks.is_writer:
        written = write_statistics(place, found, source, steps * batch)
        print_statistics(written, place, time.perf_counter() - began)
    runtime.ranks.barrier("statistics")


def look_at_images(runtime: Runtime, parts: Parts, steps: int) -> dict[str, Moments]:
    """Sums over this rank's share of the first steps, by `NUMBER.KIND`."""
    task = parts.task
    shapes = {
        f"{number}.{of}": shape
        for number, kinds in enumerate(task.feature_shapes)
        for of, shape in kinds.items()
    }
    found = {name: Moments(width) for name, (_, width) in shapes.items()}
    batches = itertools.islice(iterate_batches(parts, 0), steps)
    with contextlib.closing(map_batches(task.pack_features, batches, runtime)) as asked:
        for _, answers in asked:
            add_answers(found, shapes, runtime.fetch(answers).numpy())
    return found


def add_answers(
    found: dict[str, Moments], shapes: dict[str, tuple[int, int]], answers: np.ndarray
) -> None:
    """Take what `pack_features` gave: [B, all numbers of an image], kind after kind.

    Args:
      shapes: rows of an image and their width, by kind, in the order of the answers.
    """
    start = 0
    for name, (rows, width) in shapes.items():
        found[name].add(answers[:, start : start + rows * width].reshape(-1, width))
        start += rows * width


def merge_ranks(parts: list[dict[str, Moments]]) -> dict[str, Moments]:
    """All ranks' sums as one, in the order of the ranks."""
    first, *others = parts
    for other in others:
        for name, moments in other.items():
            first[name].merge(moments)
    return first


def print_statistics(written: FeatureStatistics, place: str, seconds: float) -> None:
    """What was found, a line for each teacher and kind."""
    for name, rows in written.facts["rows"].items():
        variances = written.tensors[f"{name}.variances"]
        spread = np.sqrt([variances.min(), variances.mean(), variances.max()])
        print(
            f"teacher {name.replace('.', ', ')}: {rows} rows of {variances.size}; std of channels "
            f"{spread[0]:.3g} to {spread[2]:.3g}, of all {spread[1]:.3g}"
        )
    print(f"{written.facts['images']} images in {seconds:.0f} s: {place}")
