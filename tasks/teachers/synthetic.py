"""Teachers of random weights, for runs whose teachers are not available."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from models.factory import build_model
from models.teachers.teacher import SELVES, get_teacher_sections
from utils.config.load import change
from utils.json_types import JsonMapping
from utils.storage.places import is_there
from utils.weights.facts import WeightFacts
from utils.weights.files import EXPORT_FILE, write_weights
from utils.weights.hub import is_shared
from utils.weights.opening import open_weights

if TYPE_CHECKING:
    from collections.abc import Callable
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
    """Return the run with other teachers; those that are the student itself stay.

    `create` makes a teacher's replacement from its section and a directory to create.
    """
    teachers = [
        section
        if section.model in SELVES or (only_missing and section.weights)
        else create(section, folder / f"teacher{number}")
        for number, section in enumerate(get_teacher_sections(config.distill))
    ]
    given = [section.model_dump() for section in teachers]
    return change(config, distill={"teacher": "", "teacher_weights": "", "teachers": given})


def read_facts(section: TeacherSection) -> WeightFacts:
    """Read the metadata of a teacher's weights; empty if they are not available."""
    path_or_url = section.weights
    if is_shared(path_or_url) or (path_or_url and is_there(path_or_url)):
        return open_weights(path_or_url, "distill.teacher_weights").facts
    return {}


def write_random(name: str, arguments: JsonMapping, folder: Path, facts: JsonObject) -> Path:
    """Write a model's random weights, and facts, into a new directory; return the file."""
    torch.manual_seed(0)
    model = build_model(name, dict(arguments), key="distill.teacher")
    folder.mkdir(parents=True)
    path = folder / EXPORT_FILE
    write_weights(path, model.state_dict(), {"model": name, **facts})
    return path
