"""Training tasks. A task is a class with its `check`, and a row in `TASKS`."""

from __future__ import annotations

from utils.registry import Registry

TASKS = Registry(
    "train.task",
    {
        "classify": "tasks.classify.task:Classify",
        "distil": "tasks.distil.task:Distil",
        "language": "tasks.language.task:Language",
        "multilabel": "tasks.classify.multilabel:Multilabel",
        "regress": "tasks.regress.task:Regress",
    },
)
