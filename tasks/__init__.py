"""What is learnt. A task is one class with its `check`, and one row in `TASKS`."""

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
