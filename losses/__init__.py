"""Task and distillation losses: pure maths on tensors, one family a file."""

from losses import logits
from losses.base import LOSSES, Loss, LossInputs, LossOutput
from losses.factory import create_loss
from losses.objective import Objective, create_objective
from losses.sparse import SparseTeacher

__all__ = [
    "LOSSES",
    "Loss",
    "LossInputs",
    "LossOutput",
    "Objective",
    "SparseTeacher",
    "create_loss",
    "create_objective",
    "logits",
]
