"""What travels with a batch: this rank's training batches from a step on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from datasets import ImageBatch, Loader, Position
from tasks.classify import TEACHER_IMAGES, TERM_SCALES

if TYPE_CHECKING:
    from job.build import Parts


def iterate_batches(parts: Parts, first_step: int) -> Iterator[ImageBatch]:
    """Training batches from a step on, with this rank's share of all that travels with them.

    A cache that is shorter than the run starts over, and so do its epochs' crops and mixing.
    """
    loader, cache = parts.train_loader, parts.cache
    period = None if cache is None else cache.epochs * loader.batches_per_epoch
    step = first_step
    while True:
        stream_step = step if period is None else step % period
        for batch in _iterate_stream(parts, stream_step):
            if parts.term_weights is not None:
                scales = {TERM_SCALES: parts.term_weights.get_scales(step)}
                batch = replace(batch, values={**batch.values, **scales})
            yield batch
            step += 1
            if period is not None and step % period == 0:
                break


def iterate_stream_steps(parts: Parts, first_step: int) -> Iterator[tuple[int, ImageBatch]]:
    """Steps and host batches with what is drawn for them: the stream that a cache stores."""
    loader = parts.train_loader
    position = _get_position(parts, loader, first_step)
    # From here on positions count on this run's processes.
    parts.state.input_processes = loader.shard[1]
    for step, batch in enumerate(loader.batches(position), start=first_step):
        yield step, _add_draws(batch, parts.objective.sample(step, loader))


def _iterate_stream(parts: Parts, first_step: int) -> Iterator[ImageBatch]:
    second = None
    if parts.second_loader is not None:
        position = _get_position(parts, parts.second_loader, first_step)
        second = iter(parts.second_loader.batches(position))
    for step, batch in iterate_stream_steps(parts, first_step):
        if parts.cache is not None:
            batch = _add_draws(batch, parts.cache.read(step, batch.indices))
        if second is not None:
            batch = _add_draws(batch, {TEACHER_IMAGES: next(second).images})
        yield batch


def _add_draws(batch: ImageBatch, drawn: Mapping[str, Tensor]) -> ImageBatch:
    return replace(batch, draws={**batch.draws, **drawn})


def _get_position(parts: Parts, loader: Loader, step: int) -> Position:
    """Where a loader stands before a step."""
    epoch, batch_in_epoch = divmod(step, loader.batches_per_epoch)
    examples = batch_in_epoch * loader.global_batch_size
    return Position(epoch, examples, parts.state.input_processes)
