"""Computes means and variances of teachers' features over training images."""

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
from tasks.distil.task import Distil
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


def measure(options: argparse.Namespace) -> int:
    """Check the configuration, compute on its runtime, write the file."""
    config = load_config(get_run_flags(options))
    path = options.out or config.distill.statistics
    if config.train.task != "distil":
        raise UserError(
            f"train.task ({config.train.task}) compares no features of teachers; set distil"
        )
    if not path:
        raise UserError("--out is missing and distill.statistics is empty; name a file")
    if options.images < 2:
        raise UserError(f"--images ({options.images}) gives no variance; give 2 or more")
    open_folder(path).parent.probe()
    config = change(  # the file to write cannot be read yet
        config,
        distill={"standardise": "none", "statistics": ""},
        run={"resume": "", "run_id": "", "eval_only": False},
    )
    job = check(config)
    work = (job, path, options.images, describe_source(config))
    launch(config.runtime, collect, *work, own_code=config.run.own_code)
    return 0


def collect(runtime: Runtime, job: Job, path: str, images: int, source: JsonObject) -> None:
    """Sum over this rank's images, merge the ranks' sums and write the statistics."""
    setup_logging(runtime.ranks.index, runtime.ranks.size)
    parts = build_parts(runtime, job)
    began = time.perf_counter()
    batch = job.config.data.global_batch_size
    steps = min(-(-images // batch), job.steps_per_epoch)
    try:
        own = sum_images(runtime, parts, steps)
    finally:
        parts.close()
    merged, *others = runtime.ranks.gather(own)
    for other in others:  # in the order of the ranks
        for name, moments in other.items():
            merged[name].merge(moments)
    if runtime.ranks.is_writer:
        written = write_statistics(path, merged, source, steps * batch)
        print_statistics(written, path, time.perf_counter() - began)
    runtime.ranks.barrier("statistics")


def sum_images(runtime: Runtime, parts: Parts, steps: int) -> dict[str, Moments]:
    """Sum over this rank's share of the first steps, by `NUMBER.KIND`."""
    task = parts.task
    assert isinstance(task, Distil)
    shapes = {
        f"{number}.{of}": shape
        for number, kinds in enumerate(task.feature_shapes)
        for of, shape in kinds.items()
    }
    sums = {name: Moments(width) for name, (_, width) in shapes.items()}
    batches = itertools.islice(iterate_batches(parts, 0), steps)
    with contextlib.closing(map_batches(task.pack_features, batches, runtime)) as packed:
        for _, features in packed:
            add_features(sums, shapes, runtime.fetch(features).numpy())
    return sums


def add_features(
    sums: dict[str, Moments], shapes: dict[str, tuple[int, int]], features: np.ndarray
) -> None:
    """Add the output of `pack_features`: [B, all numbers of an image].

    Args:
      shapes: rows of an image and their width, by kind, in the order of `features`.
    """
    start = 0
    for name, (rows, width) in shapes.items():
        sums[name].add(features[:, start : start + rows * width].reshape(-1, width))
        start += rows * width


def print_statistics(written: FeatureStatistics, path: str, seconds: float) -> None:
    """Print a line for each teacher and kind of feature."""
    for name, rows in written.facts["rows"].items():
        variances = written.tensors[f"{name}.variances"]
        spread = np.sqrt([variances.min(), variances.mean(), variances.max()])
        print(
            f"teacher {name.replace('.', ', ')}: {rows} rows of {variances.size}; std of channels "
            f"{spread[0]:.3g} to {spread[2]:.3g}, of all {spread[1]:.3g}"
        )
    print(f"{written.facts['images']} images in {seconds:.0f} s: {path}")
