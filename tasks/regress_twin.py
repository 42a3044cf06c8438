"""The twin of a regression: made-up rows of as many inputs and targets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from datasets import describe_dataset, require_vectors
from tasks.protocol import Twin
from utils.config import change

if TYPE_CHECKING:
    from utils.config import RunConfig


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
