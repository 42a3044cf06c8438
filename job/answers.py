"""Which examples of an evaluation were answered rightly: gathered beside it, at no pass of its own.

The marks of each batch stay on the device as outputs of the batch's own graph, and come to the host
in one read once the evaluation is over.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from engine import evaluate, sum_batches
from store.record.hits import Hits
from tasks.protocol import HasExtraSets, MarksExamples
from utils.log import get_logger

if TYPE_CHECKING:
    from torch import Tensor, nn

    from datasets import Batch
    from job.build import Parts
    from job.spec import Job
    from tasks.protocol import RunTask
    from utils.metrics import Evaluation
    from utils.runtime.base import Runtime


def describe_split(job: Job) -> list[str]:
    """What tells the evaluated split from others, wherever it lies and however it is prepared."""
    data = job.config.data
    return [data.source, data.name, str(job.stream["dataset"][2]), data.eval_split]


class Answers:
    """A task as an evaluation calls it, which keeps what is said of each example.

    Args:
      identity: what tells the split from others, for the hash of its examples.
    """

    def __init__(self, task: RunTask, runtime: Runtime, identity: Sequence[object] = ()) -> None:
        self.unit, self._task, self._runtime = task.unit, task, runtime
        self._identity = json.dumps(list(identity)).encode()
        self._marks: list[Tensor] = []
        self._seen: list[_Seen] = []

    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> Evaluation:
        """As `engine.evaluate`."""
        return evaluate(model, self._follow(batches), self, self._runtime)

    def loss(self, model: nn.Module, batch: Batch) -> object:
        """As the task's."""
        return self._task.loss(model, batch)

    def count(self, model: nn.Module, batch: Batch) -> Tensor:
        """As the task's; the marks of the batch stay on the device."""
        if not isinstance(self._task, MarksExamples):
            return self._task.count(model, batch)
        sums, marks = self._task.count_marked(model, batch)
        if marks is not None:
            self._marks.append(marks)
        return sums

    def summarise(self, sums: Tensor) -> Evaluation:
        """As the task's."""
        return self._task.summarise(sums)

    def gather(self, step: int) -> Hits | None:
        """The marks of all ranks in the order of the split; called by all ranks alike.

        None where the task marks nothing. # host read: one in all
        """
        if not self._marks:
            return None
        host = self._runtime.fetch_all({str(n): one for n, one in enumerate(self._marks)})
        marks = [host[str(number)].numpy() for number in range(len(self._marks))]
        ranks = self._runtime.ranks
        rows: list[np.ndarray] = []
        for seen, mark in zip(self._seen, marks, strict=True):
            # Over several hosts a mesh's array holds the examples of all of them.
            first = ranks.index * seen.size if len(mark) > seen.size else 0
            own = mark[first : first + seen.size][seen.valid]
            rows.append(np.column_stack([seen.ids, own.astype(np.int64)]))
        found = np.concatenate(ranks.gather(np.concatenate(rows)))
        return self._pack(step, found[np.argsort(found[:, 0], kind="stable")])

    def _pack(self, step: int, rows: np.ndarray) -> Hits:
        ids = hashlib.sha256(self._identity)
        ids.update(np.ascontiguousarray(rows[:, :2].astype("<i8")).tobytes())
        bits = np.packbits(rows[:, 2].astype(bool)).tobytes()
        return Hits(step, len(rows), ids.hexdigest(), bits)

    def _follow(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Notes which examples a batch holds, while it is on the host."""
        for batch in batches:
            self._seen.append(_look_at(batch))
            yield batch


@dataclass(frozen=True)
class _Seen:
    """What is known of a batch on the host.

    Attributes:
      size: padding included.
      valid: [size] bool.
      ids: [n, 2] int64 of the valid examples: index in the split, label.
    """

    size: int
    valid: np.ndarray
    ids: np.ndarray


def _look_at(batch: Batch) -> _Seen:
    valid = batch.mask.numpy().copy()
    indices = batch.indices.numpy()[valid].astype(np.int64)
    labels = batch.get_tensors().get("labels")
    known = np.zeros_like(indices) if labels is None else labels.numpy()[valid]
    return _Seen(len(batch), valid, np.stack([indices, known.astype(np.int64)], axis=1))


def add_further_sets(
    evaluation: Evaluation,
    runtime: Runtime,
    parts: Parts,
    follow: Callable[[Iterable[Batch]], Iterator[Batch]],
) -> Evaluation:
    """An evaluation with what the task says of further sets, where it has some.

    Args:
      follow: batches -> the same, with a sign of life for each.
    """
    task, state, plan = parts.task, parts.state, parts.plan
    if not isinstance(task, HasExtraSets):
        return evaluation
    number = None if state.step >= plan.total_steps else state.step // plan.eval_every
    found = task.judge(
        state.eval_model,
        lambda count, batches: sum_batches(count, follow(batches), runtime),
        number,
    )
    strange = next((name for name, value in found.items() if not math.isfinite(value)), None)
    if strange is not None:
        get_logger().warning("step %d: %s of data.evals is not finite", state.step, strange)
    name = task.score_metric
    score = found.get(name, math.nan) if name else evaluation.score
    return replace(evaluation, beside=found, score=score)
