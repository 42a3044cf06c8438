"""Predictions for every image below a folder, as rows of a table."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from tqdm import tqdm

from engine import map_batches
from models.patches.choice import patch_for
from models.trained import TrainedModel
from models.transforms import to_pixels
from tools.predict.table import ENDINGS, FilePrediction, TableForm, WriteRow, open_table
from tools.weights.flags import WEIGHTS_KEY
from tools.weights.load_model import load_trained, open_images
from utils.config.execution import RuntimeSection
from utils.config.sections import ModelSection
from utils.errors import EXIT_FAILED, UserError
from utils.programs import prepare_file, require_at_least
from utils.runtime.launcher import create_runtime

if TYPE_CHECKING:
    from datasets import ImageBatch, Loader
    from utils.runtime.base import Runtime

_NOT_FINITE = "the model's answer is not finite; check its weights and --precision"


def predict(options: argparse.Namespace) -> int:
    """Write the table of every image; return the exit code. A UserError if a flag is unusable."""
    require_at_least(1, options, "top_k", "batch_size")
    if options.out.suffix not in ENDINGS:
        raise UserError(f"--out ({str(options.out)!r}) must end with {', '.join(ENDINGS)}")
    prepare_file(options.out, "--out")
    section = RuntimeSection(device=options.device, precision=options.precision)
    runtime = create_runtime(section)
    trained = load_trained(options)
    if not trained.num_classes and not options.embed:
        raise UserError(
            f"{WEIGHTS_KEY} ({options.weights!r}) holds a model without a classifier, which says "
            "nothing of classes; add --embed for its features"
        )
    loader = open_images(options.folder, "FOLDER", trained.pp, options.batch_size)
    features = trained.count_features() if options.embed else 0
    form = TableForm(min(options.top_k, trained.num_classes), features)
    seen = expected = spoilt = 0
    with open_table(options.out, form) as write:
        for row, index in _iterate_rows(runtime, trained, loader, form):
            _write_broken(write, loader, range(expected, index))
            write(row)
            seen, expected, spoilt = seen + 1, index + 1, spoilt + bool(row.error)
        _write_broken(write, loader, range(expected, loader.num_examples))
    loader.close()
    broken = loader.num_examples - seen
    words = f", {broken} could not be read" if broken else ""
    words += f", {spoilt} answers are not finite" if spoilt else ""
    print(f"{options.out}: {seen - spoilt} images answered by {trained.location}{words}")
    return 0 if seen > spoilt else EXIT_FAILED


def _write_broken(write: WriteRow, loader: Loader, indices: Iterable[int]) -> None:
    """Write rows of unreadable files where they belong: rows are in the order of files."""
    for index in indices:
        name, reason = loader.explain(index)
        write(FilePrediction(name, error=reason))


def _iterate_rows(
    runtime: Runtime, trained: TrainedModel, loader: Loader, form: TableForm
) -> Iterator[tuple[FilePrediction, int]]:
    """Yield the row and the number of each image that can be read, a batch behind the device.

    # host read: one a batch
    """
    patch_for(runtime, ModelSection(), trained.model, frozen=True)
    runtime.prepare(trained.model)
    transform = trained.create_transform().to(runtime.device)

    @torch.no_grad()
    def compute(batch: ImageBatch) -> Tensor:
        """Return [B, 2 k + D + 1]: probabilities, classes, features, whether all are finite."""
        features, logits = trained.compute_outputs(transform(to_pixels(batch.images)))
        best, classes = trained.compute_scores(logits.float()).topk(form.top_k)
        parts = [best, classes.float(), *([features.float()] if form.features else [])]
        # Of all classes, as NaN may stand beside the best.
        is_finite = logits.isfinite().all(dim=1, keepdim=True)
        return torch.cat([*parts, is_finite.float()], dim=1)

    before: tuple[ImageBatch, Tensor] | None = None
    with tqdm(total=loader.num_examples, unit="img", disable=not sys.stderr.isatty()) as bar:
        for outputs in map_batches(compute, loader.batches(), runtime):
            if before is not None:
                yield from _make_rows(runtime, trained, form, *before)
            before = outputs
            bar.update(min(len(outputs[0]), loader.num_examples - bar.n))
        if before is not None:
            yield from _make_rows(runtime, trained, form, *before)


def _make_rows(
    runtime: Runtime, trained: TrainedModel, form: TableForm, batch: ImageBatch, outputs: Tensor
) -> Iterator[tuple[FilePrediction, int]]:
    host, indices = runtime.fetch(outputs).tolist(), runtime.fetch(batch.indices).tolist()
    count = form.top_k
    for name, index, (*values, is_finite) in zip(batch.ids or (), indices, host, strict=True):
        if index < 0:
            continue
        if not is_finite or not all(map(math.isfinite, values)):
            yield FilePrediction(name, error=_NOT_FINITE), index
            continue
        best = tuple(
            (int(number), trained.get_class_name(int(number)), score)
            for number, score in zip(values[count : 2 * count], values[:count], strict=True)
        )
        features = tuple(values[2 * count :]) if form.features else None
        yield FilePrediction(name, best, features), index
