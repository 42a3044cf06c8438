"""The twin of a regression: made-up rows of as many inputs and targets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from big_vision.input.rows.arrays import require_vectors
from datasets import describe_dataset
from models.factory import build_model
from models.teachers.teacher import EMA, get_teacher_sections
from tasks.protocol import Twin
from utils.config.load import change
from utils.storage.places import is_there
from utils.weights.files import EXPORT_FILE, write_weights
from utils.weights.opening import open_weights

if TYPE_CHECKING:
    from utils.config.distill import TeacherSection
    from utils.config.load import RunConfig


class RegressTwin(Twin):
    """Rows of noise, as files that the source `arrays` reads."""

    usual = MappingProxyType({"in_features": 8, "out_features": 1})

    def __init__(self, config: RunConfig, given: Mapping[str, int]) -> None:
        self._config = config
        self._sizes = dict(given)
        if self._sizes.keys() < self.usual.keys():
            facts = describe_dataset(config.data).examples["train"]
            rows = require_vectors(facts, config.data.source)
            found = {"in_features": len(rows.input_names), "out_features": len(rows.target_names)}
            self._sizes = {**found, **given}

    def replace_data(self, examples: int, folder: Path, *, by_trial: bool = False) -> RunConfig:
        """Normal numbers, whose columns all have a spread."""
        place = folder / "rows"
        place.mkdir(parents=True)
        generator = np.random.default_rng(0)
        for split in ("train", "validation"):
            np.savez(
                place / f"{split}.npz",
                inputs=generator.standard_normal((examples, self._sizes["in_features"])),
                targets=generator.standard_normal((examples, self._sizes["out_features"])),
            )
        data = {"source": "arrays", "root": str(folder), "name": place.name, "order": "auto",
                "train_split": "train", "eval_split": "validation", "test_split": "",
                "input_columns": [], "target_columns": []}  # fmt: skip
        return change(self._config, data=data)

    def replace_teachers(
        self, config: RunConfig, folder: Path, *, only_missing: bool = False
    ) -> RunConfig:
        """Random weights of the teachers' own shapes, or of what the section says."""
        teachers = [
            one
            if one.model == EMA or (only_missing and one.weights)
            else self._create_teacher(one, folder / f"teacher{number}")
            for number, one in enumerate(get_teacher_sections(config.distill))
        ]
        given = [one.model_dump() for one in teachers]
        return change(config, distill={"teacher": "", "teacher_weights": "", "teachers": given})

    def _create_teacher(self, section: TeacherSection, folder: Path) -> TeacherSection:
        known = section.weights and is_there(section.weights)
        facts = open_weights(section.weights, "distill.teacher_weights").facts if known else {}
        name = section.model or facts.get("model", self._config.model.name)
        arguments = {**facts.get("args", {}), **section.args}
        sizes = {**self._sizes, "variance": facts.get("variance", False)}
        model = build_model(name, {**arguments, **sizes}, key="distill.teacher")
        folder.mkdir(parents=True)
        facts = {"model": name, "args": arguments, "variance": sizes["variance"]}
        write_weights(folder / EXPORT_FILE, model.state_dict(), facts)
        changed = {"model": "", "weights": str(folder), "args": {}}
        return type(section).model_validate({**section.model_dump(), **changed})
