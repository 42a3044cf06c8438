"""Losses on the norm and the direction of embeddings: ND of KD++."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from losses.base import LossInputs, Shapes
from losses.factory import check_positive
from losses.features.gaussians import get_vector, get_width, pool_shapes
from losses.features.heads import require_one_pair
from losses.features.hints import ProjectedLoss
from losses.memories import RankMemory
from losses.reductions import Mask, mean_valid, safe_sqrt, unit_rows
from utils.errors import UserError

MIN_NORM = 1e-12  # under the longer of two embeddings


def compute_norm_and_direction(
    student: Tensor, teacher: Tensor, directions: Tensor, *, mask: Mask = None
) -> Tensor:
    """Compute 1 - s e / max(|s|, |t|): the student turns to e and grows to the teacher's length.

    The gradient flows through the student's length as well.

    Args:
      student, teacher: [B, D].
      directions: [B, D] unit vectors e, the direction of each example's class.

    Source: Wang et al. 2023 (KD++), arXiv:2305.17007, section 3, as in its authors' code.
    """
    norms = [safe_sqrt(side.square().sum(dim=-1)) for side in (student, teacher)]
    longest = torch.maximum(*norms).clamp(min=MIN_NORM)
    return mean_valid(1 - (student * directions).sum(dim=-1) / longest, mask)


class NormAndDirection(RankMemory, ProjectedLoss):
    """`compute_norm_and_direction` towards the teacher's mean embedding of each class.

    KD++ is this with `kd`, DKD++ with `dkd`. The paper takes the means over the training set
    beforehand; here they are those of all examples, of all ranks, that the loss has seen before the
    step, sums in a buffer; for a class not seen yet the example's own teacher gives the direction.
    Maps and tokens are averaged over positions first.
    """

    why_not_tokens = "keeps a mean embedding for each class, too many for a vocabulary"

    def __init__(
        self, layers: Mapping[str, str], num_classes: int, regressor: str = "auto"
    ) -> None:
        super().__init__(layers, regressor)
        require_one_pair("nd", self)
        check_positive("nd", num_classes=num_classes)
        self.num_classes = num_classes

    def build(self, student_shapes: Shapes, teacher_shapes: Shapes) -> None:
        """Create a projection between the vectors, and the sums of the teacher's."""
        super().build(pool_shapes(student_shapes), pool_shapes(teacher_shapes))
        width = get_width(teacher_shapes[next(iter(self.layers.values()))])
        self.register_buffer("sums", torch.zeros(self.num_classes, width))

    def compute(self, inputs: LossInputs) -> Tensor:
        (path,) = self.layers
        student, teacher = (get_vector(x) for x in self.get_raw_pair(inputs, path))
        if inputs.student_logits.shape[-1] > self.num_classes:
            raise UserError(
                f"distill.losses: nd.num_classes ({self.num_classes}) is less than the student's "
                f"{inputs.student_logits.shape[-1]} classes; raise it"
            )
        classes = inputs.target_classes().long()
        sums = self.sums.to(teacher.dtype)[classes]
        is_seen = (sums != 0).any(dim=-1, keepdim=True)
        directions = unit_rows(torch.where(is_seen, sums, teacher))
        if torch.is_grad_enabled():
            self.remember(teacher, classes, inputs.mask)
        student = self.project(path, student)
        return compute_norm_and_direction(student, teacher, directions, mask=inputs.mask)

    @torch.no_grad()
    def remember(self, teacher: Tensor, classes: Tensor, mask: Mask) -> None:
        """Add embeddings [B, D], and those of the other ranks, to the sums of their classes."""
        if mask is not None:
            teacher = torch.where(mask.unsqueeze(1), teacher, torch.zeros_like(teacher))
        rows = self.gather(teacher.to(self.sums.dtype))
        self.sums.index_add_(0, self.gather(classes), rows)
