"""What can be found wrong with a language model before a device is touched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from big_vision.input.text.windows import TokenFacts, require_tokens
from datasets import describe_dataset
from losses.tasks.chunked import choose_chunk
from losses.weighted import create_weighted_loss
from models.table import list_taking, takes_argument
from models.teachers.tokens import create_token_teachers
from tasks.language.teaching import count_answers, find_token_shapes
from tasks.protocol import TaskFacts
from tasks.teachers.cache.reader import open_cache
from tasks.teachers.cache.rows import CLASSES, AnswerForm
from tasks.teachers.dry_run import FeatureShapes, dry_run_layers, dry_run_losses
from tasks.teachers.taught import TaughtCheck
from tasks.teachers.teaching import check_layers
from utils.errors import UserError
from utils.json_types import JsonObject

if TYPE_CHECKING:
    from utils.config.load import RunConfig


@dataclass(frozen=True, kw_only=True)
class LanguageFacts(TaskFacts):
    """What is known of a language model.

    Args:
      tokens: vocabulary and length of the windows.
      feature_shapes: of the layers that losses look at.
    """

    tokens: TokenFacts
    feature_shapes: FeatureShapes

    @property
    def answers(self) -> tuple[AnswerForm, ...]:
        """Tokens of the vocabulary, and an answer at each place of a window."""
        length = self.tokens.sequence_length
        return (AnswerForm(CLASSES, self.tokens.vocab_size, length),)


class LanguageCheck(TaughtCheck):
    """Looks at a configuration, then at the student on the meta device.

    Attributes:
      tokens: vocabulary and length of the windows.

    Raises:
      UserError: the first thing that is wrong.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        _check_model_name(config.model.name)
        self.dataset = describe_dataset(config.data, config.model.known_sizes)
        self.tokens: TokenFacts = require_tokens(self.dataset.examples["train"], config.data.source)
        self.model_arguments = {
            "vocab_size": self.tokens.vocab_size,
            "sequence_length": self.tokens.sequence_length,
        }
        self.losses = create_weighted_loss(config.distill)
        self._feature_shapes: FeatureShapes = ({}, {})
        self._refuse_losses()

    @property
    def stream(self) -> JsonObject:
        """What beside keys decides which answers a teacher gives."""
        return {
            "vocab_size": self.tokens.vocab_size,
            "sequence_length": self.tokens.sequence_length,
            "tokenizer": self.tokens.tokenizer,
        }

    def check_micro_batch(self, examples: int, devices: int) -> None:
        """Refuse a batch of which not even one token's logits fit into the limit."""
        size, limit = self.tokens.vocab_size, self.config.train.logits_mib
        data = self.config.data
        evaluated = data.eval_batch_size or data.global_batch_size
        examples = max(examples, -(-evaluated // devices)) * count_answers(self.config)
        if not choose_chunk(examples, self.tokens.sequence_length, size, limit):
            raise UserError(
                f"train.logits_mib ({limit:g}) holds no logits of {size} tokens for {examples} "
                "examples at once; raise it, or lower data.global_batch_size and eval_batch_size"
            )

    def dry_run(self, student: nn.Module) -> None:
        """Try a window on the student."""
        tokens = torch.zeros((2, self.tokens.sequence_length), dtype=torch.int32, device="meta")
        with torch.no_grad():
            student(tokens)
        teachers = create_token_teachers(self.config.distill, self.tokens, device="meta")
        check_layers(self.config, self.losses, student, teachers)
        self._feature_shapes = find_token_shapes(student, teachers, self.losses, self.tokens)
        with torch.device("meta"):
            self.losses.build(*self._feature_shapes)
        dry_run_losses(self.config.distill, self.losses, self.tokens.vocab_size)
        dry_run_layers(
            self.config.distill, self.losses, self.tokens.vocab_size, self._feature_shapes
        )

    def find_facts(self) -> LanguageFacts:
        """All that was found, once the student has been tried."""
        return self.gather(
            LanguageFacts,
            self._describe(),
            export=self._describe_export(),
            tokens=self.tokens,
            feature_shapes=self._feature_shapes,
        )

    def check_stream(self, stream: JsonObject, total_steps: int) -> None:
        """Refuse stored answers to another stream of windows, or of other teachers."""
        if self.config.distill.teacher_cache:
            open_cache(self.config.distill, stream, self.teachers, (0, 1), total_steps)

    def _describe_export(self) -> JsonObject:
        config = self.config
        facts = {"model": config.model.name, "args": dict(config.model.args)}
        if self.tokens.tokenizer:
            facts["tokenizer"] = self.tokens.tokenizer
        return {**facts, **self.model_arguments}

    def _refuse_losses(self) -> None:
        """Refuse terms whose examples cannot be tokens, each by its own reason."""
        for name, loss in zip(self.losses.names, self.losses.losses, strict=True):
            if loss.why_not_tokens:
                raise UserError(
                    f"distill.losses: {name} means nothing to train.task=language: it "
                    f"{loss.why_not_tokens}; use kd, reverse_kl or jsd, say"
                )

    def _describe(self) -> str:
        tokens = self.tokens
        text = f"{tokens.vocab_size} tokens, windows of {tokens.sequence_length}"
        if tokens.floor is not None:
            text += f"; the loss can reach {tokens.floor:.4f} nats a token"
        return text


def _check_model_name(name: str) -> None:
    """Refuse a model that takes no tokens before it is built."""
    if not takes_argument(name, "vocab_size"):
        raise UserError(
            f"model.name ({name!r}) takes no tokens, which train.task=language learns from; choose "
            f"{', '.join(list_taking('vocab_size'))}"
        )
