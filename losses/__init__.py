"""Task and distillation losses: pure maths on tensors, one family a file."""

from losses import (
    cached,
    contrastive,
    decoupled,
    distances,
    ensembles,
    features,
    logits,
    matching,
    multilevel,
    relations,
    standardise,
)
from losses.base import LOSSES, Loss, LossInputs, LossOutput
from losses.factory import create_loss
from losses.objective import Objective, create_objective
from losses.sparse import SparseTeacher

FAMILIES = (
    cached,
    contrastive,
    decoupled,
    distances,
    ensembles,
    features,
    logits,
    matching,
    multilevel,
    relations,
    standardise,
)

__all__ = [
    "FAMILIES",
    "LOSSES",
    "Loss",
    "LossInputs",
    "LossOutput",
    "Objective",
    "SparseTeacher",
    "create_loss",
    "create_objective",
]
