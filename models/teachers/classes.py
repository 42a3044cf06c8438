"""Maps the student's classes to a teacher's, by number, by name or by a file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from models.table import MODELS
from utils.errors import UserError
from utils.storage.places import open_folder
from utils.weights.class_names import (
    BY_NAME,
    ClassSide,
    map_classes_by_name,
    read_class_names,
    require_same_classes,
)
from utils.weights.hub import is_shared

if TYPE_CHECKING:
    from models.teachers.teacher import TeacherSource

_MAP_KEY = "distill.teachers label_map"


def count_classes(source: TeacherSource, num_classes: int) -> int:
    """Return the number of a teacher's classes; the student's `num_classes` if it is unknown."""
    return source.section.num_classes or source.facts.get("num_classes") or num_classes


def check_teacher_names(
    source: TeacherSource, num_classes: int, class_names: tuple[str, ...] | None
) -> None:
    """Raise a UserError if a teacher's class names, or their order, are not the student's.

    Warns if one side has none.
    """
    if source.section.label_map:
        return
    require_same_classes(
        _get_student_side(class_names),
        _get_side(source, count_classes(source, num_classes)),
        way=f"use a teacher of the same classes, or map them by {_MAP_KEY}, a JSON list",
        by_name=f"set {_MAP_KEY} to {BY_NAME}, which maps them by name",
    )


def load_label_map(
    source: TeacherSource, num_classes: int, class_names: tuple[str, ...] | None
) -> Tensor | None:
    """Load a teacher's map, int64 [K], or None; UserError if it is broken or of other classes."""
    path, own_classes = source.section.label_map, count_classes(source, num_classes)
    if not path:
        return None
    if path == BY_NAME:
        way = "give a JSON list of class numbers"
        side = _get_side(source, own_classes)
        return torch.tensor(map_classes_by_name(_get_student_side(class_names), side, way))
    try:
        values = json.loads(read_label_map(path))
    except ValueError as error:
        raise _explain_label_map(path, error) from error
    is_list = isinstance(values, list) and all(isinstance(v, int) and v >= 0 for v in values)
    if not is_list or len(values) != num_classes:
        raise UserError(
            f"{_MAP_KEY} ({path!r}) must be a list of {num_classes} class numbers, one for each "
            "class of the student"
        )
    if max(values) >= own_classes:
        raise UserError(
            f"{_MAP_KEY} ({path!r}) names class {max(values)}, but {source.name!r} has "
            f"{own_classes}; set num_classes or correct the map"
        )
    return torch.tensor(values, dtype=torch.int64)


def read_label_map(path: str) -> str:
    """Read a map's text, or return BY_NAME as it is; UserError if it cannot be read."""
    if path == BY_NAME:
        return path
    file = open_folder(path)
    try:
        return file.parent.read_text(file.name)
    except (OSError, UnicodeDecodeError) as error:
        raise _explain_label_map(path, error) from error


def _get_student_side(class_names: tuple[str, ...] | None) -> ClassSide:
    return ClassSide("the student", class_names)


def _get_side(source: TeacherSource, count: int) -> ClassSide:
    weights = source.section.weights
    is_public = (not weights or is_shared(weights)) and source.name not in MODELS
    names = read_class_names(source.facts, count, is_public=is_public)
    return ClassSide(f"distill.teacher {weights or source.name!r}", names)


def _explain_label_map(path: str, error: Exception) -> UserError:
    return UserError(
        f"{_MAP_KEY} ({path!r}) cannot be read: {error}; give a JSON list of class numbers"
    )
