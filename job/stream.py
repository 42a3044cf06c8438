"""The stream of training batches: this rank's share of each step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from datasets import Batch, Position
from tasks.protocol import Caches, Draws, HasStepValues

if TYPE_CHECKING:
    from job.build import Parts


def iterate_batches(
    parts: Parts, first_step: int, input_processes: int | None = None
) -> Iterator[Batch]:
    """Yield training batches from a step on, with their draws and values.

    A stream that is shorter than the run starts over, with the same crops and draws.
    `input_processes` is for the position of the first step; 0: any number, None: those of this run.
    """
    task, loader = parts.task, parts.train_loader
    epochs = task.stream_epochs if isinstance(task, Caches) else None
    period = epochs and epochs * loader.batches_per_epoch
    processes = loader.shard[1] if input_processes is None else input_processes
    step = first_step
    while True:
        stream_step = step if period is None else step % period
        epoch, batch_in_epoch = divmod(stream_step, loader.batches_per_epoch)
        position = Position(epoch, batch_in_epoch * loader.global_batch_size, processes)
        streams = (part.batches(position) for part in parts.train_loaders)
        for batches in zip(*streams, strict=True):
            batch = task.draw(stream_step, *batches) if isinstance(task, Draws) else batches[0]
            if isinstance(task, HasStepValues):
                batch = replace(batch, values={**batch.values, **task.get_values(step)})
            yield batch
            step, stream_step = step + 1, stream_step + 1
            if period is not None and step % period == 0:
                break
        # From here on positions refer to this run's processes.
        processes = loader.shard[1]
