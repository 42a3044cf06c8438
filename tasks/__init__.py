"""Training tasks. A task is a class with its `check`, and a row in `TASKS`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from utils.registry import Registry

if TYPE_CHECKING:
    from datasets import Batch
    from tasks.protocol import RunTask

TASKS: Registry[type[RunTask[Batch]]] = Registry(
    "train.task",
    {
        "classify": "tasks.classify.task:Classify",
        "distil": "tasks.distil.task:Distil",
        "language": "tasks.language.task:Language",
        "multilabel": "tasks.classify.multilabel:Multilabel",
        "regress": "tasks.regress.task:Regress",
    },
)
