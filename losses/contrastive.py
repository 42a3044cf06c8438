"""Contrastive representation distillation against a memory of the whole training split."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from losses.base import LOSSES, LossInputs, Shapes
from losses.factory import check_positive
from losses.features import FeatureLoss
from losses.reductions import mean_valid, unit_rows
from utils.errors import UserError


def compute_scores(embeddings: Tensor, memory_rows: Tensor, temperature: float) -> Tensor:
    """[B, 1 + N] exp(dot / temperature) of each embedding with its rows of the memory.

    Args:
      embeddings: [B, D], unit L2 norm; receives the gradient.
      memory_rows: [B, 1 + N, D], the positive first; constant here.
      temperature: > 0; exp(1 / temperature) must be finite in float32, so at least 0.0115.
    """
    products = (memory_rows.detach() * embeddings.unsqueeze(1)).sum(dim=-1)
    return (products / temperature).exp()


def compute_contrast(
    scores: Tensor, num_examples: int, *, eps: float, mask: Tensor | None = None
) -> Tensor:
    """Noise-contrastive loss of one side.

    Args:
      scores: [B, 1 + N], divided by the normaliser, the positive first.
      num_examples: rows of the memory; negatives are drawn with probability 1 / num_examples.
      eps: keeps the logarithms finite.
      mask: bool [B], valid examples.

    Returns:
      Scalar in nats: summed over the positive and the negatives, averaged over valid examples.

    Source: Tian, Krishnan and Isola 2020 (CRD), arXiv:1910.10699, equation 18, as coded in
    RepDistiller and mdistiller.
    """
    noise = (scores.shape[-1] - 1) / num_examples
    positive = (scores[:, 0] / (scores[:, 0] + noise + eps)).log()
    negatives = (noise / (scores[:, 1:] + noise + eps)).log().sum(dim=-1)
    return mean_valid(-(positive + negatives), mask)


@LOSSES.register("crd")
class CRD(FeatureLoss):
    """Student and teacher embeddings of one pair of layers, each against the other's memory.

    `num_examples` rows are held per side, as buffers; a row moves to
    unit(momentum * row + (1 - momentum) * embedding) after each step. `embed_dim` 0 takes the
    activations as unit embeddings, else linear layers and L2 normalisation make them.
    Each side's normaliser Z = num_examples * mean(exp(..)) is estimated on the first step, without
    gradient, and kept (buffers `student_normaliser` and `teacher_normaliser`, -1 before). Needs
    `LossInputs.example_indices`; negatives are drawn on the device unless `contrast_indices` are
    given. Targets are not used.
    On several ranks each updates its own examples' rows only, so the memories differ by rank.
    """

    why_not_tokens = "keeps a memory of every example of the split"

    eps = 1e-7  # keeps logarithms finite; the references' own, no key of a run

    def __init__(
        self,
        layers: Mapping[str, str],
        num_examples: int,
        embed_dim: int = 128,
        negatives: int = 16384,
        contrast_temperature: float = 0.07,
        momentum: float = 0.5,
    ) -> None:
        super().__init__(layers)
        check_positive(
            "crd",
            num_examples=num_examples,
            negatives=negatives,
            contrast_temperature=contrast_temperature,
        )
        if len(layers) != 1:
            raise UserError(f"distill.losses: crd takes one pair of layers and got {len(layers)}")
        self.num_examples = num_examples
        self.embed_dim = embed_dim
        self.negatives = negatives
        self.contrast_temperature = contrast_temperature
        self.momentum = momentum
        self.student_embedding: nn.Module = nn.Identity()
        self.teacher_embedding: nn.Module = nn.Identity()
        self.register_buffer("student_normaliser", torch.tensor(-1.0))
        self.register_buffer("teacher_normaliser", torch.tensor(-1.0))

    def build(self, student_shapes: Shapes, teacher_shapes: Shapes) -> None:
        """Embedding layers, and memories filled with random rows of about unit length."""
        (student_path, teacher_path) = next(iter(self.layers.items()))
        student = math.prod(student_shapes[student_path][1:])
        teacher = math.prod(teacher_shapes[teacher_path][1:])
        if self.embed_dim:
            self.student_embedding = UnitEmbedding(student, self.embed_dim)
            self.teacher_embedding = UnitEmbedding(teacher, self.embed_dim)
        for side, width in (("student", student), ("teacher", teacher)):
            width = self.embed_dim or width
            bound = math.sqrt(3 / width)
            rows = torch.empty(self.num_examples, width).uniform_(-bound, bound)
            self.register_buffer(f"{side}_memory", rows)

    def compute(self, inputs: LossInputs) -> Tensor:
        """The sum of both sides; afterwards the memories hold the new embeddings."""
        if inputs.example_indices is None:
            raise UserError("distill.losses: crd needs the examples' indices and got none")
        path = next(iter(self.layers))
        student, teacher = (features.flatten(1) for features in self.get_pair(inputs, path))
        student, teacher = self.student_embedding(student), self.teacher_embedding(teacher)
        indices = self._get_contrast_indices(inputs)
        value = self._compute_side(student, self.teacher_memory, indices, inputs, "student")
        value = value + self._compute_side(teacher, self.student_memory, indices, inputs, "teacher")
        for memory, embeddings in ((self.student_memory, student), (self.teacher_memory, teacher)):
            self._update(memory, embeddings.detach(), inputs)
        return value

    def _get_contrast_indices(self, inputs: LossInputs) -> Tensor:
        if inputs.contrast_indices is not None:
            return inputs.contrast_indices.long()
        own = inputs.example_indices.long()
        shape = (own.shape[0], self.negatives)
        drawn = torch.randint(self.num_examples, shape, device=own.device)
        return torch.cat([own.unsqueeze(1), drawn], dim=1)

    def _compute_side(
        self, embeddings: Tensor, memory: Tensor, indices: Tensor, inputs: LossInputs, side: str
    ) -> Tensor:
        rows = memory.index_select(0, indices.reshape(-1)).reshape(*indices.shape, -1)
        scores = compute_scores(embeddings, rows, self.contrast_temperature)
        stored = self.student_normaliser if side == "student" else self.teacher_normaliser
        estimate = mean_valid(scores.detach().mean(dim=1), inputs.mask) * self.num_examples
        is_new = (stored < 0) & (estimate > 0)  # no estimate from a batch without valid examples
        stored.copy_(torch.where(is_new, estimate.to(stored.dtype), stored))
        divisor = torch.where(stored > 0, stored, torch.ones_like(stored))
        return compute_contrast(scores / divisor, self.num_examples, eps=self.eps, mask=inputs.mask)

    def _update(self, memory: Tensor, embeddings: Tensor, inputs: LossInputs) -> None:
        indices = inputs.example_indices.long()
        rows = memory.index_select(0, indices)
        moved = unit_rows(self.momentum * rows + (1 - self.momentum) * embeddings)
        change = (moved - rows).to(memory.dtype)
        if inputs.mask is not None:
            change = change * inputs.mask.unsqueeze(1).to(change.dtype)
        memory.index_add_(0, indices, change)


class UnitEmbedding(nn.Module):
    """A linear layer and L2 normalisation."""

    def __init__(self, width: int, embed_dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, embed_dim)

    def forward(self, features: Tensor) -> Tensor:
        """[B, embed_dim] of unit length."""
        return unit_rows(self.linear(features))
