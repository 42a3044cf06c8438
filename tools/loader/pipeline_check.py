"""Prints, measures and draws the output of an input pipeline."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from big_vision.input.batches import Batch, ImageBatch
from big_vision.input.images.labelled import ImageFacts
from big_vision.input.source import require_facts
from tools.loader.open_loader import plan_loader

if TYPE_CHECKING:
    from datasets import Loader

_GAP = 4
_MIN_CELL = 104  # pixels, for the caption


def run(arguments: argparse.Namespace) -> None:
    """Open the loader, print, measure and draw."""
    plan = plan_loader(arguments)
    loader = plan.open((arguments.rank, arguments.world_size))
    facts = require_facts(loader.facts, ImageFacts, plan.data.source)
    print(
        f"{plan.title} {plan.split}: {loader.num_examples} "
        f"examples, {facts.num_classes} classes, order {loader.order}, "
        f"{loader.batches_per_epoch} batches of {loader.global_batch_size} "
        f"({loader.rank_batch_size} on rank {arguments.rank} of {arguments.world_size})"
    )
    mean, std = facts.normalisation
    print(f"on the device: (images - {_format(mean)}) / {_format(std)}")
    batch = _require_images(next(iter(loader.batches())))
    print_samples(batch, facts.class_names, arguments.num_samples)
    if arguments.time_it:
        for line in measure(loader, arguments.num_loops, arguments.loop_batches):
            print(line)
    if arguments.save_grid:
        indices = batch.indices[batch.mask][: arguments.num_samples].tolist()
        views = [
            _require_images(loader.load_examples(indices, epoch))
            for epoch in range(arguments.views)
        ]
        save_grid(views, Path(arguments.save_grid))
        print(f"contact sheet: {arguments.save_grid}")
    loader.close()


def _require_images(batch: Batch) -> ImageBatch:
    assert isinstance(batch, ImageBatch)
    return batch


def print_samples(batch: ImageBatch, names: Sequence[str] | None, count: int) -> None:
    """Print a line for each of the first samples."""
    ids = batch.ids or ()
    for number in range(min(count, int(batch.mask.sum()))):
        image, label = batch.images[number], int(batch.labels[number])
        name = f" ({names[label]})" if names else ""
        print(
            f"  {ids[number]}: shape {tuple(image.shape)}, {str(image.dtype)[6:]}, "
            f"range {int(image.min())}..{int(image.max())}, label {label}{name}"
        )


def measure(loader: Loader, loops: int, loop_batches: int) -> list[str]:
    """Measure images per second of this rank, loop by loop, after a loop to warm up."""
    batches = iter(loader.batches())
    speeds = []
    for _ in range(loops + 1):
        start, images = time.perf_counter(), 0
        for _ in range(loop_batches):
            batch = next(batches, None)
            if batch is None:
                # The end of an evaluation pass.
                batches = iter(loader.batches())
                batch = next(batches)
            images += int(batch.mask.sum())
        speeds.append(images / (time.perf_counter() - start))
    timed = speeds[1:] or speeds
    lines = [f"  loop {number}: {speed:.0f} images/s" for number, speed in enumerate(timed)]
    median = statistics.median(timed)
    summary = f"images/s: min {min(timed):.0f}, median {median:.0f}, max {max(timed):.0f}"
    return [*lines, summary]


def save_grid(views: Sequence[ImageBatch], path: Path) -> None:
    """Save a PNG with a row for each sample and a column for each view."""
    from PIL import Image, ImageDraw

    height, width = views[0].images.shape[1:3]
    scale = -(-_MIN_CELL // max(height, width))
    cell = (width * scale, height * scale)
    rows, caption = len(views[0].labels), 14
    step = (cell[0] + _GAP, cell[1] + _GAP + caption)
    sheet = Image.new("RGB", (len(views) * step[0] + _GAP, rows * step[1] + _GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for column, view in enumerate(views):
        for row, image in enumerate(view.images):
            pixels = image.numpy()
            pixels = pixels[..., 0] if pixels.shape[-1] == 1 else pixels[..., :3]
            picture = Image.fromarray(pixels).convert("RGB").resize(cell, Image.Resampling.NEAREST)
            corner = (_GAP + column * step[0], _GAP + row * step[1])
            sheet.paste(picture, corner)
            text = f"label {int(view.labels[row])}, epoch {column}"
            draw.text((corner[0], corner[1] + cell[1]), text, fill="black")
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)


def _format(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)
