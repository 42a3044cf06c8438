"""The twin of a language model's run: made-up windows of the same length and vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from big_vision.input.text.windows import require_tokens
from datasets import describe_dataset
from tasks.protocol import Twin
from utils.config.load import change
from utils.errors import UserError

if TYPE_CHECKING:
    from utils.config.load import RunConfig


class LanguageTwin(Twin):
    """Windows of drawn tokens.

    Attributes:
      vocabulary: different tokens.
    """

    usual = MappingProxyType({"vocab_size": 32_000})

    def __init__(self, config: RunConfig, given: Mapping[str, int]) -> None:
        self._config = config
        self.vocabulary = given.get("vocab_size") or _find_vocabulary(config)

    def replace_data(self, examples: int, folder: Path, *, by_trial: bool = False) -> RunConfig:
        """Sequences of as many different tokens, in windows of data.sequence_length."""
        name = f"noise,symbols={self.vocabulary},num_examples={examples}"
        data = {"source": "sequences", "name": name, "root": "", "order": "auto",
                "train_split": "train", "eval_split": "validation", "test_split": ""}  # fmt: skip
        return change(self._config, data=data)


def _find_vocabulary(config: RunConfig) -> int:
    """Tokens that the run's dataset may hold.

    Raises:
      UserError: it is not here.
    """
    data = config.data
    try:
        facts = describe_dataset(data, config.model.known_sizes)
    except UserError as error:
        raise UserError(
            f"the vocabulary of the dataset is not known here: {error}; or give --assume "
            "vocab_size=NUMBER to the tool"
        ) from error
    return require_tokens(facts.examples["train"], data.source).vocab_size
