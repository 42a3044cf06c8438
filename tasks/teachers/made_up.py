"""Teachers of random weights, for runs whose teachers are not here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from models.factory import build_model
from models.teachers.teacher import SELVES, get_teacher_sections
from utils.config.load import change
from utils.storage.places import is_there
from utils.weights.files import EXPORT_FILE, write_weights
from utils.weights.hub import is_shared
from utils.weights.opening import open_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from utils.config.distill import TeacherSection
    from utils.config.load import RunConfig
    from utils.json_types import JsonObject


def replace_each(
    config: RunConfig,
    folder: Path,
    create: Callable[[TeacherSection, Path], TeacherSection],
    *,
    only_missing: bool,
) -> RunConfig:
    """The same run with other teachers; those that are the student itself stay.

    Args:
      create: a teacher's section and a directory to make -> what stands for it.
      only_missing: teachers that have weights keep them.
    """
    teachers = [
        one
        if one.model in SELVES or (only_missing and one.weights)
        else create(one, folder / f"teacher{number}")
        for number, one in enumerate(get_teacher_sections(config.distill))
    ]
    given = [one.model_dump() for one in teachers]
    return change(config, distill={"teacher": "", "teacher_weights": "", "teachers": given})


def read_facts(section: TeacherSection) -> JsonObject:
    """What a teacher's weights tell of their model; empty where they are not here."""
    place = section.weights
    is_here = is_shared(place) or (bool(place) and is_there(place))
    return open_weights(place, "distill.teacher_weights").facts if is_here else {}


def write_random(
    name: str, arguments: Mapping[str, object], folder: Path, facts: JsonObject
) -> Path:
    """The file of a model's random weights, in a new directory.

    Args:
      facts: that stand in the file beside the model's name.
    """
    torch.manual_seed(0)
    model = build_model(name, dict(arguments), key="distill.teacher")
    folder.mkdir(parents=True)
    path = folder / EXPORT_FILE
    write_weights(path, model.state_dict(), {"model": name, **facts})
    return path
