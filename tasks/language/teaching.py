"""Distillation of a language model: teachers that run in the step, or their stored outputs.

All logits are made a chunk of positions at a time, the teachers' as the student's. A loss of a
teacher's outputs is then a mean over the rows of a chunk, and its sum over chunks is that of all
tokens, whatever the chunk's size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from big_vision.input.text.windows import TokenFacts
from datasets import TokenBatch
from losses.base import LossInputs, SparseTeacher
from losses.logits.ensembles import combine_answers
from losses.tasks.chunked import iterate_chunks
from losses.weighted import WeightedLoss
from models.features import get_feature_shapes
from models.teachers.teacher import get_teacher_sections
from models.teachers.tokens import TokenTeacher
from tasks.teachers.cache.reader import combine_stored, get_stored_answers
from tasks.teachers.cache.rows import condense_answers
from tasks.teachers.dry_run import FeatureShapes
from tasks.teachers.teaching import TERM_SCALES, Teaching

if TYPE_CHECKING:
    from utils.config.load import RunConfig


@dataclass(frozen=True)
class Lesson:
    """Teachers' outputs for one micro-batch."""

    hidden: tuple[Tensor, ...]  # states [B, T, C] of each live teacher
    stored: tuple[SparseTeacher, ...]  # outputs [B, T, k] of a cache, of each teacher
    mask: Tensor  # bool [B], valid windows
    term_scales: Tensor | None  # float [terms], scheduled factors on the weights of the terms
    judged: Tensor | None = None  # float [T], 1 at the positions that are learnt; None if all are


class TokenTeaching(Teaching[TokenTeacher]):
    """Teachers of tokens, or their stored outputs, and the terms that read logits."""

    def __init__(self, config: RunConfig, losses: WeightedLoss, tokens: TokenFacts) -> None:
        super().__init__(config, losses)
        self.config, self.losses, self.tokens = config, losses, tokens

    def begin(self, batch: TokenBatch, judged: Tensor | None = None) -> Lesson:
        """Run the teachers on a micro-batch; `judged` [T] is 1 at learnt positions."""
        return Lesson(
            hidden=tuple(self.ask(batch.tokens[:, :-1])),
            stored=get_stored_answers(batch),
            mask=batch.mask,
            term_scales=batch.values.get(TERM_SCALES),
            judged=judged,
        )

    def score(
        self, lesson: Lesson, logits: Tensor, targets: Tensor, places: slice
    ) -> dict[str, Tensor]:
        """Return the sum over valid tokens of each term that reads logits, by its name.

        Logits are float32 [B, n, V] of a chunk of positions, targets int [B, n].
        """
        terms = [
            (name, loss)
            for name, loss in zip(self.losses.names, self.losses.losses, strict=True)
            if not loss.student_layers()
        ]
        if not terms:
            return {}
        stored, only_stored = combine_stored(
            [_cut_stored(stored, places) for stored in lesson.stored],
            logits.shape[-1],
            *self.get_ensemble(),
        )
        mask = lesson.mask[:, None].expand_as(targets)
        rows = lesson.mask.float().sum() * targets.shape[1]
        if lesson.judged is not None:
            mask = mask & (lesson.judged[places] > 0)
            rows = mask.float().sum()
        inputs = LossInputs(
            student_logits=logits.flatten(0, 1),
            targets=None,
            labels=targets.flatten(),
            mask=mask.flatten(),
            teacher_logits=stored
            or combine_answers(self.answer_each(lesson.hidden, places), *self.get_ensemble()),
            sparse_teacher=only_stored,
        )
        return {name: loss(inputs) * rows for name, loss in terms}

    def score_layers(self, batch: TokenBatch, states: Tensor) -> dict[str, Tensor]:
        """Return the mean over valid windows of each term that reads layers, by its name."""
        seen = self.take_seen(batch)
        inputs = LossInputs(student_logits=states, targets=None, mask=batch.mask, **seen)
        return {
            name: loss(inputs)
            for name, loss in zip(self.losses.names, self.losses.losses, strict=True)
            if loss.student_layers()
        }

    def condense(self, batch: TokenBatch, top_k: Sequence[int], chunk: int) -> tuple[Tensor, ...]:
        """Return what a cache keeps [B, T, 2 k + 1] of each teacher's outputs, for its `top_k`.

        `chunk` positions have logits at once.
        """
        hidden, length = self.ask(batch.tokens[:, :-1]), self.tokens.sequence_length
        parts: list[list[Tensor]] = [[] for _ in hidden]
        for places in iterate_chunks(length, chunk):
            answers = self.answer_each(hidden, places)
            for own, answer, k in zip(parts, answers, top_k, strict=True):
                own.append(condense_answers(answer, k).unflatten(0, (len(batch), -1)))
        return tuple(torch.cat(own, dim=1) for own in parts)

    def answer_each(self, hidden: Sequence[Tensor], places: slice) -> list[Tensor]:
        """Return logits [B * n, V] of each teacher at some positions."""
        return [
            teacher.compute_logits(states[:, places]).flatten(0, 1)
            for teacher, states in zip(self.teachers, hidden, strict=True)
        ]


def create_place_weights(tokens: TokenFacts) -> Tensor | None:
    """Create float [T], 1 at the positions that are learnt and evaluated; None if all are."""
    if not tokens.judged:
        return None
    weights = torch.zeros(tokens.sequence_length)
    weights[list(tokens.judged)] = 1.0
    return weights


def find_token_shapes(
    student: nn.Module, teachers: Sequence[TokenTeacher], losses: WeightedLoss, tokens: TokenFacts
) -> FeatureShapes:
    """Find the shapes of the layers that losses read, of models on the meta device."""
    window, layers = (tokens.sequence_length,), losses.teacher_layers()
    asked = teachers[0].model if layers else student
    return (
        get_feature_shapes(student, losses.student_layers(), window, "student", torch.int32),
        get_feature_shapes(asked, layers, window, "teacher", torch.int32),
    )


def count_answers(config: RunConfig) -> int:
    """Count logits of one token that a step holds at once: the student's and each teacher's."""
    if config.distill.teacher_cache:
        return 1 + max(1, len(get_teacher_sections(config.distill)))
    return 1 + len(get_teacher_sections(config.distill))


def _cut_stored(stored: SparseTeacher, places: slice) -> SparseTeacher:
    return SparseTeacher(
        stored.log_probs[:, places].flatten(0, 1),
        stored.indices[:, places].flatten(0, 1),
        stored.residual[:, places].flatten(),
    )
