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
from losses.sparse import SparseTeacher
from losses.weighted import WeightedLoss, create_weighted_loss

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
    "SparseTeacher",
    "WeightedLoss",
    "create_loss",
    "create_weighted_loss",
]
