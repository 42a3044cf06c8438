"""Losses for stored teachers that never build the teacher's whole distribution."""

from __future__ import annotations

from torch import Tensor

from losses.base import Loss, LossInputs
from losses.sparse import compute_sparse_cross_entropy
from utils.errors import UserError


class TinyViTSparse(Loss):
    """`compute_sparse_cross_entropy` with the step's stored teacher; targets are not used."""

    def compute(self, inputs: LossInputs) -> Tensor:
        if inputs.sparse_teacher is None:
            raise UserError(
                "distill.losses: tinyvit_sparse needs stored teacher answers; set "
                "distill.teacher_cache, or use kd with form: cross_entropy and a live teacher"
            )
        return compute_sparse_cross_entropy(
            inputs.student_logits, inputs.sparse_teacher, mask=inputs.mask
        )
