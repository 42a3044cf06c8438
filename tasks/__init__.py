"""Training tasks. A task is a class with its `check`, and a row in `TASKS`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from utils.registry import Registry

if TYPE_CHECKING:
    from tasks.protocol import RunTask

TASKS: Registry[type[RunTask[Any]]] = Registry(
    "train.task",
    {
        "classify": "tasks.classify.task:Classify",
        "distil": "tasks.distil.task:Distil",
        "language": "tasks.language.task:Language",
        "multilabel": "tasks.classify.multilabel:Multilabel",
        "regress": "tasks.regress.task:Regress",
    },
)
