"""A synthetic regression: random rows of as many inputs and targets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from big_vision.input.rows.arrays import VectorFacts
from big_vision.input.source import require_facts
from datasets import describe_dataset
from tasks.protocol import SYNTHETIC_SPLITS, SyntheticRun
from tasks.teachers.synthetic import read_facts, replace_each, write_random
from utils.config.load import change

if TYPE_CHECKING:
    from utils.config.distill import TeacherSection
    from utils.config.load import RunConfig
    from utils.json_types import JsonObject


class SyntheticRegress(SyntheticRun):
    """Rows of noise, as files that the source `arrays` reads."""

    default_sizes = MappingProxyType({"in_features": 8, "out_features": 1})

    def __init__(self, config: RunConfig, given: Mapping[str, int]) -> None:
        self._config = config
        self._sizes = dict(given)
        if self._sizes.keys() < self.default_sizes.keys():
            facts = describe_dataset(config.data).examples["train"]
            rows = require_facts(facts, VectorFacts, config.data.source)
            sizes = {"in_features": len(rows.input_names), "out_features": len(rows.target_names)}
            self._sizes = {**sizes, **given}

    def replace_data(self, examples: int, folder: Path, *, by_trial: bool = False) -> RunConfig:
        """Return the run on normal numbers, so that every column has a spread."""
        place = folder / "rows"
        place.mkdir(parents=True)
        generator = np.random.default_rng(0)
        for split in ("train", "validation"):
            np.savez(
                place / f"{split}.npz",
                inputs=generator.standard_normal((examples, self._sizes["in_features"])),
                targets=generator.standard_normal((examples, self._sizes["out_features"])),
            )
        data: JsonObject = {"source": "arrays", "root": str(folder), "name": place.name}
        data |= {**SYNTHETIC_SPLITS, "input_columns": [], "target_columns": []}
        return change(self._config, data=data)

    def replace_teachers(
        self, config: RunConfig, folder: Path, *, only_missing: bool = False
    ) -> RunConfig:
        return replace_each(config, folder, self._create_teacher, only_missing=only_missing)

    def _create_teacher(self, section: TeacherSection, folder: Path) -> TeacherSection:
        known = read_facts(section)
        name = section.model or known.get("model", self._config.model.name)
        arguments = {**known.get("args", {}), **section.args}
        variance = known.get("variance", False)
        sizes = {**self._sizes, "variance": variance}
        write_random(
            name, {**arguments, **sizes}, folder, {"args": arguments, "variance": variance}
        )
        changed: JsonObject = {"model": "", "weights": str(folder), "args": {}}
        return type(section).model_validate({**section.model_dump(), **changed})
