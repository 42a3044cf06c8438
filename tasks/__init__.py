"""What is learnt. A task is one class with its `check`, and one row in `TASKS`."""

from tasks.classify import Classify
from tasks.distil import Distil
from tasks.facts import TaskFacts
from tasks.language import Language
from tasks.multilabel import Multilabel
from tasks.protocol import RunTask, TaskCheck, Twin
from tasks.regress import Regress
from utils.registry import Registry

TASKS = Registry("train.task")
TASKS.register("classify")(Classify)
TASKS.register("distil")(Distil)
TASKS.register("language")(Language)
TASKS.register("multilabel")(Multilabel)
TASKS.register("regress")(Regress)

__all__ = [
    "TASKS",
    "Classify",
    "Distil",
    "Language",
    "Multilabel",
    "Regress",
    "RunTask",
    "TaskCheck",
    "TaskFacts",
    "Twin",
]
