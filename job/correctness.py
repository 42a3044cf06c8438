"""Which examples of an evaluation were classified correctly, without a pass of its own.

The marks of each batch stay on the device as outputs of the batch's own graph, and are copied to
the host in one read after the evaluation.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from engine import evaluate, sum_batches
from store.record.hits import Hits
from tasks.protocol import HasExtraSets, MarksExamples
from utils.log import get_logger

if TYPE_CHECKING:
    from torch import Tensor, nn

    from datasets import Batch
    from engine import TaskLoss
    from job.build import Parts
    from job.spec import Job
    from tasks.protocol import RunTask
    from utils.metrics import Evaluation
    from utils.runtime.base import Runtime


def describe_split(job: Job) -> list[str]:
    """Return what identifies the evaluated split, independent of its path and preprocessing."""
    data = job.config.data
    return [data.source, data.name, str(job.stream["dataset"][2]), data.eval_split]


class Correctness:
    """A task for an evaluation that keeps the correctness of examples; `identity`: of the split."""

    def __init__(self, task: RunTask[Batch], runtime: Runtime, *identity: str) -> None:
        self.unit, self._task, self._runtime = task.unit, task, runtime
        self._identity = json.dumps(identity).encode()
        self._marks: list[Tensor] = []
        # Of each batch: its size with padding, [size] bool of valid examples, and [n, 2] int64 of
        # these: index in the split, label.
        self._seen: list[tuple[int, np.ndarray, np.ndarray]] = []

    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> Evaluation:
        return evaluate(model, self._follow(batches), self, self._runtime)

    def loss(self, model: nn.Module, batch: Batch) -> TaskLoss:
        return self._task.loss(model, batch)

    def count(self, model: nn.Module, batch: Batch) -> Tensor:
        """Call the task's method; the marks of the batch stay on the device."""
        if not isinstance(self._task, MarksExamples):
            return self._task.count(model, batch)
        sums, marks = self._task.count_with_correctness(model, batch)
        if marks is not None:
            self._marks.append(marks)
        return sums

    def summarise(self, sums: Tensor) -> Evaluation:
        return self._task.summarise(sums)

    def gather(self, step: int) -> Hits | None:
        """Gather the marks of all ranks in the order of the split; called by all ranks alike.

        None if the task marks nothing. # host read: one for all batches
        """
        if not self._marks:
            return None
        host = self._runtime.fetch_all({str(n): mark for n, mark in enumerate(self._marks)})
        marks = [host[str(number)].numpy() for number in range(len(self._marks))]
        ranks = self._runtime.ranks
        blocks: list[np.ndarray] = []
        for (size, valid, ids), mark in zip(self._seen, marks, strict=True):
            # Over several hosts a mesh's array holds the examples of all of them.
            first = ranks.index * size if len(mark) > size else 0
            own = mark[first : first + size][valid]
            blocks.append(np.column_stack([ids, own.astype(np.int64)]))
        rows = np.concatenate(ranks.gather(np.concatenate(blocks)))
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        ids = hashlib.sha256(self._identity)
        ids.update(np.ascontiguousarray(rows[:, :2].astype("<i8")).tobytes())
        bits = np.packbits(rows[:, 2].astype(bool)).tobytes()
        return Hits(step, len(rows), ids.hexdigest(), bits)

    def _follow(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Record the examples of each batch while it is on the host."""
        for batch in batches:
            valid = batch.mask.numpy().copy()
            indices = batch.indices.numpy()[valid].astype(np.int64)
            labels = batch.get_tensors().get("labels")
            known = np.zeros_like(indices) if labels is None else labels.numpy()[valid]
            ids = np.stack([indices, known.astype(np.int64)], axis=1)
            self._seen.append((len(batch), valid, ids))
            yield batch


def add_further_sets(
    evaluation: Evaluation,
    runtime: Runtime,
    parts: Parts,
    follow: Callable[[Iterable[Batch]], Iterator[Batch]],
) -> Evaluation:
    """Add metrics on further sets, if any; `follow` wraps batches with beats of the stall watch."""
    task, state, plan = parts.task, parts.state, parts.plan
    if not isinstance(task, HasExtraSets):
        return evaluation
    number = None if state.step >= plan.total_steps else state.step // plan.eval_every
    metrics = task.evaluate_extra_sets(
        state.eval_model,
        lambda count, batches: sum_batches(count, follow(batches), runtime),
        number,
    )
    bad = next((name for name, value in metrics.items() if not math.isfinite(value)), None)
    if bad is not None:
        get_logger().warning("step %d: %s of data.evals is not finite", state.step, bad)
    name = task.score_metric
    score = metrics.get(name, math.nan) if name else evaluation.score
    return replace(evaluation, beside=metrics, score=score)
