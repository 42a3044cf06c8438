"""Task and distillation losses: pure maths on tensors, one family a file."""

from losses import (
    cached as cached,
)
from losses import (
    contrastive as contrastive,
)
from losses import (
    decoupled as decoupled,
)
from losses import (
    distances as distances,
)
from losses import (
    divergences as divergences,
)
from losses import (
    ensembles as ensembles,
)
from losses import (
    features as features,
)
from losses import (
    gaussians as gaussians,
)
from losses import (
    generative as generative,
)
from losses import (
    heads as heads,
)
from losses import (
    logits as logits,
)
from losses import (
    maps as maps,
)
from losses import (
    matching as matching,
)
from losses import (
    multilevel as multilevel,
)
from losses import (
    normalised as normalised,
)
from losses import (
    relations as relations,
)
from losses import (
    review as review,
)
from losses import (
    standardise as standardise,
)
from losses import (
    temperatures as temperatures,
)
from losses.base import LOSSES, Loss, LossInputs, LossOutput
from losses.classes import CLASS_LOSSES, ClassLoss, create_class_loss
from losses.ensembles import combine_answers
from losses.factory import create_loss
from losses.regression import GAUSSIAN, compute_gaussian_nll, get_regression_loss
from losses.sparse import SparseTeacher
from losses.weighted import WeightedLoss, create_weighted_loss
from losses.yes_or_no import YES_OR_NO, compute_bce

__all__ = [
    "CLASS_LOSSES",
    "GAUSSIAN",
    "LOSSES",
    "YES_OR_NO",
    "ClassLoss",
    "Loss",
    "LossInputs",
    "LossOutput",
    "SparseTeacher",
    "WeightedLoss",
    "combine_answers",
    "compute_bce",
    "compute_gaussian_nll",
    "create_class_loss",
    "create_loss",
    "create_weighted_loss",
    "get_regression_loss",
]
