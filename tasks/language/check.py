"""Validation of a language model's run before a device is touched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from big_vision.input.source import require_facts
from big_vision.input.text.windows import TokenFacts
from datasets import describe_dataset
from losses.tasks.chunked import choose_chunk
from losses.weighted import WeightedLoss, create_weighted_loss
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
    """Facts about a language model: its tokens, and shapes of the layers that losses read."""

    tokens: TokenFacts
    feature_shapes: FeatureShapes

    @property
    def answers(self) -> tuple[AnswerForm, ...]:
        length = self.tokens.sequence_length
        return (AnswerForm(CLASSES, self.tokens.vocab_size, length),)


class LanguageCheck(TaughtCheck):
    """Checks a configuration, then the student on the meta device; refuses the first fault."""

    losses: WeightedLoss

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        if not takes_argument(config.model.name, "vocab_size"):
            raise UserError(
                f"model.name ({config.model.name!r}) takes no tokens, which train.task=language "
                f"needs; use {', '.join(list_taking('vocab_size'))}"
            )
        self.dataset = describe_dataset(config.data, config.model.known_sizes)
        self.tokens = require_facts(self.dataset.examples["train"], TokenFacts, config.data.source)
        vocab_size, length = self.tokens.vocab_size, self.tokens.sequence_length
        self.model_arguments = {"vocab_size": vocab_size, "sequence_length": length}
        self.losses = create_weighted_loss(config.distill)
        self._feature_shapes: FeatureShapes = ({}, {})
        for name, loss in zip(self.losses.names, self.losses.losses, strict=True):
            if loss.why_not_tokens:
                raise UserError(
                    f"distill.losses: {name} is not supported with train.task=language: it "
                    f"{loss.why_not_tokens}; use a loss of logits such as kd, reverse_kl or jsd"
                )

    @property
    def stream(self) -> JsonObject:
        return {**self.model_arguments, "tokenizer": self.tokens.tokenizer}

    def check_micro_batch(self, examples: int, devices: int) -> None:
        """Refuse a batch if not even one token's logits fit into the limit."""
        size, limit = self.tokens.vocab_size, self.config.train.logits_mib
        data = self.config.data
        evaluated = data.eval_batch_size or data.global_batch_size
        examples = max(examples, -(-evaluated // devices)) * count_answers(self.config)
        if not choose_chunk(examples, self.tokens.sequence_length, size, limit):
            raise UserError(
                f"train.logits_mib ({limit:g}) is too small for the logits of {size} tokens for "
                f"{examples} examples; raise it, or lower data.global_batch_size and "
                "eval_batch_size"
            )

    def dry_run(self, student: nn.Module) -> None:
        tokens = torch.zeros((2, self.tokens.sequence_length), dtype=torch.int32, device="meta")
        with torch.no_grad():
            student(tokens)
        teachers = create_token_teachers(self.config.distill, self.tokens, device="meta")
        check_layers(self.config, self.losses, student, teachers)
        self._feature_shapes = find_token_shapes(student, teachers, self.losses, self.tokens)
        with torch.device("meta"):
            self.losses.build(*self._feature_shapes)
        distill, vocab_size = self.config.distill, self.tokens.vocab_size
        dry_run_losses(distill, self.losses, vocab_size)
        dry_run_layers(distill, self.losses, vocab_size, self._feature_shapes)

    def find_facts(self) -> LanguageFacts:
        config, tokens = self.config, self.tokens
        text = f"{tokens.vocab_size} tokens, windows of {tokens.sequence_length}"
        if tokens.floor is not None:
            text += f"; the loss can reach {tokens.floor:.4f} nats a token"
        export = {"model": config.model.name, "args": dict(config.model.args)}
        if tokens.tokenizer:
            export["tokenizer"] = tokens.tokenizer
        return self.gather(
            LanguageFacts,
            text,
            export={**export, **self.model_arguments},
            tokens=tokens,
            feature_shapes=self._feature_shapes,
        )

    def check_stream(self, stream: JsonObject, total_steps: int) -> None:
        if self.config.distill.teacher_cache:
            open_cache(self.config.distill, stream, self.teachers, (0, 1), total_steps)
