"""The methods and sets of `methods.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from utils.json_types import JsonObject, JsonValue

STUDENT = "configs/digits_student.yaml"
TEACHER = "configs/digits_teacher.yaml"


@dataclass(frozen=True)
class Entry:
    """One method.

    Args:
      term: of `distill.losses`, with the weight that the search begins with.
      teachers: 2: each has outputs of its own, `distill.ensemble: separate`.
      settings: what else the method is: further views, which multiply the student's work.
    """

    name: str
    term: JsonObject
    teachers: int = 1
    settings: JsonObject = field(default_factory=dict)


@dataclass(frozen=True)
class TableSet:
    """One dataset, of `python -m tools.prepare_dataset NAME`.

    Args:
      train_examples, classes: that some methods need.
      strong_pp: the second view, of methods that compare two.
      what: its size and difficulty, for the reader.
      data: keys of every run on it.
      student, teacher: further keys of those.
      unserved: methods that cannot teach this student -> why.
    """

    name: str
    train_examples: int
    classes: int
    strong_pp: str
    what: str
    data: JsonObject = field(default_factory=dict)
    student: JsonObject = field(default_factory=dict)
    teacher: JsonObject = field(default_factory=dict)
    unserved: Mapping[str, str] = field(default_factory=dict)


def _create_entry(
    name: str, teachers: int = 1, settings: JsonObject | None = None, **term: JsonValue
) -> Entry:
    whole = {"name": name, "weight": 1.0, **term, "args": term.get("args", {})}
    return Entry(name, whole, teachers, settings or {})


_STUDY = yaml.safe_load(Path(__file__).with_name("methods.yaml").read_text(encoding="utf-8"))
ENTRIES = tuple(_create_entry(name, **method) for name, method in _STUDY["methods"].items())
# Registered losses that are no row -> why not.
UNSERVED = {name: why for why, names in _STUDY["unserved"].items() for name in names}
SETS = {name: TableSet(name, **table_set) for name, table_set in _STUDY["sets"].items()}
