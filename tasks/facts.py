"""`TaskFacts`: what a task has found out about a run before a device is touched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from utils.errors import UserError
from utils.json_types import JsonObject

if TYPE_CHECKING:
    from datasets import DatasetFacts
    from tasks.teachers.cache.rows import AnswerForm
    from utils.config.data import DataSection


@dataclass(frozen=True, kw_only=True)
class TaskFacts:
    """What every replica is told of the task; it travels to other processes.

    Args:
      dataset: sizes and kinds of the splits.
      model_arguments: what the student is created with: `{"num_classes": 10}`.
      export: how the exported student is created again, and what its input looks like.
      stream: what of the task decides which examples, in which form, come when.
      teachers: hashes of the teachers that the run names, and how several become one.
      description: for a person, of the student's answers and of who teaches them.
      class_names: of the dataset, or None if it has none for each class of the student.
      streams: how a step's examples are read where it is not once and as `data` says: in several
        augmentations of the same ones.
      step_shapes: on how many shapes the steps work, each of which is a graph.
      set_graphs: that evaluations on further sets add to those of steps and evaluations, at most.
    """

    dataset: DatasetFacts
    model_arguments: dict[str, Any]
    export: JsonObject
    stream: JsonObject
    teachers: list[str]
    description: str
    class_names: tuple[str, ...] | None = None
    streams: tuple[DataSection, ...] = ()
    step_shapes: int = 1
    set_graphs: int = 0

    @property
    def answers(self) -> tuple[AnswerForm, ...]:
        """What a cache can store of the teachers' answers to an example.

        Raises:
          UserError: of this task it stores nothing.
        """
        raise UserError(
            "train.task has no answers that could be stored; choose a run of classify or language"
        )
