"""Language models as teachers: they give hidden states, and their head's weight beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from models.table import takes_argument
from models.teachers.teacher import (
    EMA,
    FrozenModel,
    check_shares,
    create_each,
    explain_width,
    open_teacher,
    refuse_image_keys,
)
from utils.config.distill import TeacherSection
from utils.errors import UserError

if TYPE_CHECKING:
    from utils.config.distill import DistillSection
    from utils.json_types import JsonObject


class Vocabulary(Protocol):
    """Of the student's data.

    Attributes:
      tokenizer: what tells tokens of one meaning from others; empty: nobody has said.
      sequence_length: tokens that a model sees at once.
    """

    vocab_size: int
    sequence_length: int
    tokenizer: str


class TokenTeacher(FrozenModel):
    """A teacher of tokens, which gives hidden states; logits are made of a part of them at a time.

    Its model has a `head_weight` [V, C], as a student's.
    """

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
        """Float32 logits [..., V] of hidden states; for a chunk of the places at a time."""
        return self.model.compute_logits(hidden)


def create_token_teachers(
    section: DistillSection, vocabulary: Vocabulary, *, device: str = "cpu"
) -> list[TokenTeacher]:
    """The teachers that have weights of their own, as `create_teachers`.

    Args:
      device: "cpu", or "meta" to check names, vocabulary and weights at no cost.

    Raises:
      UserError: no language model, missing or foreign weights, or tokens that do not agree.
    """
    check_shares(section)
    return create_each(section, lambda one: _create_teacher(one, vocabulary, device), (EMA,))


def _create_teacher(section: TeacherSection, own: Vocabulary, device: str) -> TokenTeacher:
    refuse_image_keys(section, "language")
    if not section.weights:
        raise UserError(
            f"distill.teacher ({section.model!r}) has no weights, and no hub has any for it; give "
            "distill.teacher_weights, a run of train.task=language"
        )
    source = open_teacher(section)
    facts = source.facts
    _require_language_model(source.name, section.weights)
    _check_vocabulary(facts, own, section.weights)
    model = source.build(
        {
            "vocab_size": own.vocab_size,
            "sequence_length": facts.get("sequence_length", own.sequence_length),
        },
        device=device,
        explain=explain_width(
            own.vocab_size,
            f"is a model of {{}} tokens, the data has {own.vocab_size}; use a teacher that was "
            "trained on tokens of the same tokenizer",
        ),
    )
    return TokenTeacher(model, weight=section.weight)


def _require_language_model(name: str, path: str) -> None:
    if not takes_argument(name, "vocab_size"):
        raise UserError(
            f"distill.teacher_weights ({path!r}) holds {name!r}, which is no language model; give "
            "a run of train.task=language on the student's tokens"
        )


def _check_vocabulary(facts: JsonObject, own: Vocabulary, path: str) -> None:
    """Refuse a teacher whose tokens are not the student's, or whose windows are shorter."""
    size = facts.get("vocab_size", own.vocab_size)
    tokenizer = facts.get("tokenizer") or own.tokenizer
    way = "use a teacher that was trained on tokens of the same tokenizer"
    if size != own.vocab_size:
        raise UserError(
            f"distill.teacher_weights ({path!r}) has a vocabulary of {size} tokens, the data "
            f"{own.vocab_size}; {way}"
        )
    if own.tokenizer and tokenizer != own.tokenizer:
        raise UserError(
            f"distill.teacher_weights ({path!r}) reads tokens of {tokenizer!r}, the data has those "
            f"of {own.tokenizer!r}; {way}"
        )
    length = facts.get("sequence_length", own.sequence_length)
    positions = facts.get("args", {}).get("positions", "rope")
    if positions != "rope" and length < own.sequence_length:
        raise UserError(
            f"distill.teacher_weights ({path!r}) knows {length} {positions} positions, "
            f"data.sequence_length is {own.sequence_length}; lower it, or use a teacher of longer "
            "windows"
        )
