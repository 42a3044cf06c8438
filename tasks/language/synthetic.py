"""A synthetic language model's run: random windows of the same length and vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from big_vision.input.source import require_facts
from big_vision.input.text.windows import TokenFacts
from datasets import describe_dataset
from tasks.protocol import SYNTHETIC_SPLITS, SyntheticRun
from utils.config.load import change
from utils.errors import UserError

if TYPE_CHECKING:
    from utils.config.load import RunConfig


class SyntheticLanguage(SyntheticRun):
    """Windows of `vocabulary` different random tokens."""

    default_sizes = MappingProxyType({"vocab_size": 32_000})

    def __init__(self, config: RunConfig, given: Mapping[str, int]) -> None:
        self._config = config
        self.vocabulary: int = given.get("vocab_size", 0)
        if self.vocabulary:
            return
        try:
            facts = describe_dataset(config.data, config.model.known_sizes)
        except UserError as error:
            raise UserError(
                f"the dataset's vocabulary is unknown here: {error}; or give --assume "
                "vocab_size=NUMBER to the tool"
            ) from error
        rows = require_facts(facts.examples["train"], TokenFacts, config.data.source)
        self.vocabulary = rows.vocab_size

    def replace_data(self, examples: int, folder: Path, *, by_trial: bool = False) -> RunConfig:
        """Return the run on sequences of as many tokens, in windows of data.sequence_length."""
        name = f"noise,symbols={self.vocabulary},num_examples={examples}"
        data = {"source": "sequences", "name": name, "root": "", "mix": (), **SYNTHETIC_SPLITS}
        return change(self._config, data=data)
