"""Token Grams: similarities of the patches of one image, for any widths."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from losses.base import Layers, LossInputs
from losses.factory import check_positive
from losses.features.hints import FeatureLoss
from losses.features.maps import match_positions
from losses.label_free.embeddings import EmbeddingLoss
from losses.reductions import Mask, as_constant, mean_valid, sum_terms, unit_rows, upcast
from utils.errors import UserError


def compute_gram(tokens: Tensor) -> Tensor:
    """Compute [B, N, N] cosines between the tokens [B, N, C] of each example."""
    rows = unit_rows(tokens)
    return rows @ rows.transpose(1, 2)


def compute_gram_mse(
    student_tokens: Tensor, teacher_tokens: Tensor, *, mask: Mask = None
) -> Tensor:
    """Compute the mean squared difference of two Gram matrices of tokens at unit length.

    The tokens are [B, N, C] of any width C. Mean over the N * N cosines: the paper's squared
    Frobenius norm divided by N^2, so that a finer grid weighs no more.

    Source: Simeoni et al. 2025 (DINOv3, Gram anchoring), arXiv:2508.10104, section 4.2.
    """
    gap = compute_gram(upcast(student_tokens)) - compute_gram(as_constant(teacher_tokens))
    return mean_valid(gap.square().mean(dim=(1, 2)), mask)


def compute_gram_kl(
    student_tokens: Tensor, teacher_tokens: Tensor, temperature: float, *, mask: Mask = None
) -> Tensor:
    """Compute KL(teacher || student) of each token's distribution over the tokens of its image.

    The tokens are [B, N, C] of any width C. Summed over the N tokens of a distribution, averaged
    over the N distributions of an example. The temperature divides the cosines; no factor T^2.

    Source: lightly-train's distillation v3 (2026), its loss within an image.
    """
    student = (compute_gram(upcast(student_tokens)) / temperature).log_softmax(dim=-1)
    teacher = (compute_gram(as_constant(teacher_tokens)) / temperature).log_softmax(dim=-1)
    each = (teacher.exp() * (teacher - student)).sum(dim=-1)
    return mean_valid(each.mean(dim=1), mask)


class GramMSE(FeatureLoss):
    """`compute_gram_mse` of each pair of maps or tokens; larger maps are pooled to smaller ones."""

    def compute(self, inputs: LossInputs) -> Tensor:
        pairs = (match_positions(*self.get_raw_pair(inputs, path)) for path in self.layers)
        return sum_terms(
            self.compute_pair(student.transpose(1, 2), teacher.transpose(1, 2), inputs.mask)
            for student, teacher in pairs
        )

    def compute_pair(self, student: Tensor, teacher: Tensor, mask: Mask) -> Tensor:
        return compute_gram_mse(student, teacher, mask=mask)


class GramKL(GramMSE):
    """`compute_gram_kl` of each pair of maps or tokens; larger maps are pooled to smaller ones."""

    def __init__(self, layers: Layers, gram_temperature: float = 0.07) -> None:
        super().__init__(layers)
        check_positive("gram_kl", gram_temperature=gram_temperature)
        self.gram_temperature = gram_temperature

    def compute_pair(self, student: Tensor, teacher: Tensor, mask: Mask) -> Tensor:
        return compute_gram_kl(student, teacher, self.gram_temperature, mask=mask)


class GramTerm(EmbeddingLoss):
    """A gap between the Gram matrices of patches: `function` of tokens [B, N, C] and the mask."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def compute(self, student: Tensor, teacher: Tensor, mask: Mask) -> Tensor:
        """Compute the scalar; a UserError for pooled features, which have no patches."""
        if student.ndim != 3:
            raise UserError(
                "distill.losses: gram_mse and gram_kl compare the patches of an image with each "
                "other; set of: patches"
            )
        return self.function(student, teacher, mask=mask)


def create_gram_mse() -> GramTerm:
    return GramTerm(compute_gram_mse)


def create_gram_kl(gram_temperature: float = 0.07) -> GramTerm:
    check_positive("gram_kl", gram_temperature=gram_temperature)
    return GramTerm(partial(compute_gram_kl, temperature=gram_temperature))
