"""Contrastive representation distillation against a memory of the whole training split."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from losses.base import LossInputs, Shapes
from losses.factory import check_positive
from losses.features.heads import require_one_pair
from losses.features.hints import FeatureLoss
from losses.memories import RankMemory
from losses.noise import draw_words, get_noise_key
from losses.reductions import Mask, mean_valid, unit_rows
from utils.errors import UserError


def compute_scores(embeddings: Tensor, memory_rows: Tensor, temperature: float) -> Tensor:
    """Compute [B, 1 + N] exp(dot / temperature) of each embedding with its rows of the memory.

    Args:
      embeddings: [B, D], unit L2 norm; receives the gradient.
      memory_rows: [B, 1 + N, D], the positive first; constant here.
      temperature: > 0; exp(1 / temperature) must be finite in float32, so at least 0.0115.
    """
    products = (memory_rows.detach() * embeddings.unsqueeze(1)).sum(dim=-1)
    return (products / temperature).exp()


def compute_contrast(scores: Tensor, num_examples: int, *, eps: float, mask: Mask = None) -> Tensor:
    """Compute the noise-contrastive loss of one side, summed over positive and negatives.

    Args:
      scores: [B, 1 + N], divided by the normaliser, the positive first.
      num_examples: rows of the memory; negatives are drawn with probability 1 / num_examples.
      eps: keeps the logarithms finite.

    Source: Tian, Krishnan and Isola 2020 (CRD), arXiv:1910.10699, equation 18, as coded in
    RepDistiller and mdistiller.
    """
    noise = (scores.shape[-1] - 1) / num_examples
    positive = (scores[:, 0] / (scores[:, 0] + noise + eps)).log()
    negatives = (noise / (scores[:, 1:] + noise + eps)).log().sum(dim=-1)
    return mean_valid(-(positive + negatives), mask)


class CRD(RankMemory, FeatureLoss):
    """Embeddings of student and teacher of one pair of layers, each against the other's memory.

    `num_examples` rows are held per side, as buffers; after each step a row moves to
    unit(momentum * row + (1 - momentum) * embedding). `embed_dim` 0 takes the activations as unit
    embeddings, else linear layers and L2 normalisation make them. Each side's normaliser
    Z = num_examples * mean(exp(..)) is estimated on the first step, without gradient, and kept
    (buffers `student_normaliser` and `teacher_normaliser`, -1 before). Rows and normalisers use the
    examples of all ranks. Needs `LossInputs.example_indices`; negatives are drawn by the step's key
    and the example unless `contrast_indices` are given.
    """

    why_not_tokens = "keeps a memory of every example of the split"
    needs_noise = True

    eps = 1e-7  # keeps logarithms finite; from the references, not a key of a run

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
        require_one_pair("crd", self)
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
        """Create embedding layers, and memories of random rows of about unit length."""
        ((_, *pair),) = self.pair_shapes(student_shapes, teacher_shapes)
        student, teacher = (math.prod(shape[1:]) for shape in pair)
        if self.embed_dim:
            self.student_embedding = UnitEmbedding(student, self.embed_dim)
            self.teacher_embedding = UnitEmbedding(teacher, self.embed_dim)
        for side, width in (("student", student), ("teacher", teacher)):
            width = self.embed_dim or width
            bound = math.sqrt(3 / width)
            rows = torch.empty(self.num_examples, width).uniform_(-bound, bound)
            self.register_buffer(f"{side}_memory", rows)

    def compute(self, inputs: LossInputs) -> Tensor:
        if inputs.example_indices is None:
            raise UserError("distill.losses: crd needs the examples' indices and got none")
        path = next(iter(self.layers))
        student, teacher = (features.flatten(1) for features in self.get_pair(inputs, path))
        student, teacher = self.student_embedding(student), self.teacher_embedding(teacher)
        indices = self._get_contrast_indices(inputs)
        scores = [
            self._score(student, self.teacher_memory, indices),
            self._score(teacher, self.student_memory, indices),
        ]
        self._remember(student, teacher, scores, inputs)
        normalisers = self.student_normaliser, self.teacher_normaliser
        return sum(map(partial(self._contrast, inputs.mask), scores, normalisers))

    def _get_contrast_indices(self, inputs: LossInputs) -> Tensor:
        if inputs.contrast_indices is not None:
            return inputs.contrast_indices.long()
        own = inputs.example_indices.long()
        drawn = draw_words(own, get_noise_key(inputs), self.negatives) % self.num_examples
        return torch.cat([own.unsqueeze(1), drawn], dim=1)

    def _score(self, embeddings: Tensor, memory: Tensor, indices: Tensor) -> Tensor:
        rows = memory.index_select(0, indices.reshape(-1)).reshape(*indices.shape, -1)
        return compute_scores(embeddings, rows, self.contrast_temperature)

    def _contrast(self, mask: Mask, scores: Tensor, normaliser: Tensor) -> Tensor:
        divisor = torch.where(normaliser > 0, normaliser, torch.ones_like(normaliser))
        return compute_contrast(scores / divisor, self.num_examples, eps=self.eps, mask=mask)

    @torch.no_grad()
    def _remember(
        self, student: Tensor, teacher: Tensor, scores: Sequence[Tensor], inputs: LossInputs
    ) -> None:
        """Estimate missing normalisers and move the rows, by the examples of all ranks."""
        means = [side.mean(dim=1, keepdim=True) for side in scores]
        mask = torch.ones_like(means[0]) if inputs.mask is None else inputs.mask.unsqueeze(1)
        # Two collectives: indices above 2^24 do not fit into float32.
        rows = self.gather(torch.cat([student, teacher, *means, mask.to(student.dtype)], dim=1))
        indices = self.gather(inputs.example_indices.long())
        widths = [student.shape[1], teacher.shape[1], 1, 1, 1]
        *embeddings, mine, theirs, mask = rows.split(widths, dim=1)
        is_valid = mask[:, 0] > 0
        for stored, mean in ((self.student_normaliser, mine), (self.teacher_normaliser, theirs)):
            estimate = mean_valid(mean[:, 0], is_valid) * self.num_examples
            is_new = (stored < 0) & (estimate > 0)  # none from a batch without valid examples
            stored.copy_(torch.where(is_new, estimate.to(stored.dtype), stored))
        memories = self.student_memory, self.teacher_memory
        for memory, own in zip(memories, embeddings, strict=True):
            before = memory.index_select(0, indices)
            moved = unit_rows(self.momentum * before + (1 - self.momentum) * own)
            memory.index_add_(0, indices, ((moved - before) * mask).to(memory.dtype))


class UnitEmbedding(nn.Module):
    """A linear layer and L2 normalisation."""

    def __init__(self, width: int, embed_dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, embed_dim)

    def forward(self, features: Tensor) -> Tensor:
        """Return [B, embed_dim] of unit length."""
        return unit_rows(self.linear(features))
