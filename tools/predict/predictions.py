"""Answers for every image below a folder, as rows of a table."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

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

_FOLDER_KEY = "FOLDER"
_NOT_FINITE = "the model's answer is not finite; check its weights and --precision"


def predict(options: argparse.Namespace) -> int:
    """Answer for every image; gives the exit code.

    Raises:
      UserError: weights, folder or a flag that cannot be used.
    """
    _check_flags(options)
    section = RuntimeSection(device=options.device, precision=options.precision)
    runtime = create_runtime(section)
    trained = load_trained(options)
    if not trained.num_classes and not options.embed:
        raise UserError(
            f"{WEIGHTS_KEY} ({options.weights!r}) holds a model without a classifier, which says "
            "nothing of classes; add --embed for its features"
        )
    wanted = Wanted(min(options.top_k, trained.num_classes), options.embed)
    loader = open_images(options.folder, _FOLDER_KEY, trained.pp, options.batch_size)
    form = TableForm(wanted.top_k, trained.count_features() if wanted.embed else 0)
    seen = expected = spoilt = 0
    with open_table(options.out, form) as write:
        for row, index in _answer(runtime, trained, loader, wanted):
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
    """Rows of files that gave no answer, where they belong: rows are in the order of files."""
    for index in indices:
        name, reason = loader.explain(index)
        write(FilePrediction(name, error=reason))


class Wanted(NamedTuple):
    """What is asked of the model: the likeliest so many classes, and features."""

    top_k: int
    embed: bool


def _answer(
    runtime: Runtime, trained: TrainedModel, loader: Loader, wanted: Wanted
) -> Iterator[tuple[FilePrediction, int]]:
    """A row, and the number of its image, for each that could be read; a batch behind the device.

    # host read: one a batch
    """
    patch_for(runtime, ModelSection(), trained.model, frozen=True)
    runtime.prepare(trained.model)
    transform = trained.create_transform().to(runtime.device)

    @torch.no_grad()
    def answer(batch: ImageBatch) -> Tensor:
        """[B, 2 k + D + 1]: probabilities, class numbers, features, whether all are finite."""
        features, logits = trained.compute_outputs(transform(to_pixels(batch.images)))
        best, classes = trained.compute_scores(logits.float()).topk(wanted.top_k)
        found = [best, classes.float(), *([features.float()] if wanted.embed else [])]
        # Of all classes, as NaN may stand beside the best.
        is_finite = logits.isfinite().all(dim=1, keepdim=True)
        return torch.cat([*found, is_finite.float()], dim=1)

    before: tuple[ImageBatch, Tensor] | None = None
    with tqdm(total=loader.num_examples, unit="img", disable=not sys.stderr.isatty()) as bar:
        for found in map_batches(answer, loader.batches(), runtime):
            if before is not None:
                yield from _make_rows(runtime, trained, wanted, *before)
            before = found
            bar.update(min(len(found[0]), loader.num_examples - bar.n))
        yield from _make_rows(runtime, trained, wanted, *before)


def _make_rows(
    runtime: Runtime, trained: TrainedModel, wanted: Wanted, batch: ImageBatch, answers: Tensor
) -> Iterator[tuple[FilePrediction, int]]:
    host, indices = runtime.fetch(answers).tolist(), runtime.fetch(batch.indices).tolist()
    count = wanted.top_k
    for name, index, values in zip(batch.ids, indices, host, strict=True):
        if index < 0:
            continue
        *values, is_finite = values
        if not is_finite or not all(map(math.isfinite, values)):
            yield FilePrediction(name, error=_NOT_FINITE), index
            continue
        numbers = [int(value) for value in values[count : 2 * count]]
        best = tuple(
            (number, trained.get_class_name(number), score)
            for number, score in zip(numbers, values[:count], strict=True)
        )
        features = tuple(values[2 * count :]) if wanted.embed else None
        yield FilePrediction(name, best, features), index


def _check_flags(options: argparse.Namespace) -> None:
    require_at_least(1, options, "top_k", "batch_size")
    if options.out.suffix not in ENDINGS:
        raise UserError(f"--out ({str(options.out)!r}) must end with {', '.join(ENDINGS)}")
    prepare_file(options.out, "--out")
