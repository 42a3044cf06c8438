"""Language models as teachers: hidden states, and the weight of their head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from models.table import takes_argument
from models.teachers.teacher import (
    EMA,
    FrozenModel,
    TeacherSource,
    check_shares,
    explain_width,
    get_teacher_sections,
    open_teacher,
    refuse_image_keys,
)
from utils.config.distill import TeacherSection
from utils.errors import UserError

if TYPE_CHECKING:
    from models.transformer import LanguageModel
    from utils.config.distill import DistillSection

_WAY_OUT = "use a teacher that was trained on tokens of the same tokenizer"


class Vocabulary(Protocol):
    """Vocabulary of the student's data; the tokenizer's name is empty if unknown."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def sequence_length(self) -> int: ...

    @property
    def tokenizer(self) -> str: ...


class TokenTeacher(FrozenModel):
    """A teacher of tokens; logits are computed for a part of its hidden states at a time."""

    model: LanguageModel

    @property
    def head_weight(self) -> Tensor:
        """[V, C]."""
        return self.model.head_weight

    @torch.no_grad()
    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states [B, N, C]."""
        return self.model(tokens)

    @torch.no_grad()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [..., V] of hidden states; for a chunk of the tokens at a time."""
        return self.model.compute_logits(hidden)


def create_token_teachers(
    section: DistillSection, vocabulary: Vocabulary, *, device: str = "cpu"
) -> list[TokenTeacher]:
    """Create teachers with weights of their own; on "meta" only check them, by a UserError."""
    check_shares(section)
    sections = [teacher for teacher in get_teacher_sections(section) if teacher.model != EMA]
    return [_create_teacher(teacher, vocabulary, device) for teacher in sections]


def _create_teacher(section: TeacherSection, own: Vocabulary, device: str) -> TokenTeacher:
    refuse_image_keys(section, "language")
    if not section.weights:
        raise UserError(
            f"distill.teacher ({section.model!r}) has no weights, and no hub has any for it; give "
            "distill.teacher_weights, a run of train.task=language"
        )
    source = open_teacher(section)
    length = _check_vocabulary(source, own)
    text = f"is a model of {{}} tokens, the data has {own.vocab_size}; {_WAY_OUT}"
    model = source.build(
        {"vocab_size": own.vocab_size, "sequence_length": length},
        device=device,
        explain=explain_width(own.vocab_size, text),
    )
    return TokenTeacher(model, weight=section.weight)


def _check_vocabulary(source: TeacherSource, own: Vocabulary) -> int:
    """Return the length of a teacher's windows; UserError if its tokens are not the student's."""
    facts, key = source.facts, f"distill.teacher_weights ({source.section.weights!r})"
    if not takes_argument(source.name, "vocab_size"):
        raise UserError(
            f"{key} holds {source.name!r}, which is no language model; give a run of "
            "train.task=language on the student's tokens"
        )
    size = facts.get("vocab_size", own.vocab_size)
    if size != own.vocab_size:
        raise UserError(
            f"{key} has a vocabulary of {size} tokens, the data {own.vocab_size}; {_WAY_OUT}"
        )
    tokenizer = facts.get("tokenizer") or own.tokenizer
    if own.tokenizer and tokenizer != own.tokenizer:
        raise UserError(
            f"{key} reads tokens of {tokenizer!r}, the data has those of {own.tokenizer!r}; "
            f"{_WAY_OUT}"
        )
    length = facts.get("sequence_length", own.sequence_length)
    positions = facts.get("args", {}).get("positions", "rope")
    if positions != "rope" and length < own.sequence_length:
        raise UserError(
            f"{key} has {length} {positions} positions, data.sequence_length is "
            f"{own.sequence_length}; lower it, or use a teacher of longer windows"
        )
    return length
