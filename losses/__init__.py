"""Task and distillation losses: pure maths on tensors, one family a file."""

from losses import (
    attention as attention,
)
from losses import (
    cached as cached,
)
from losses import (
    contrastive as contrastive,
)
from losses import (
    correlations as correlations,
)
from losses import (
    decoupled as decoupled,
)
from losses import (
    directions as directions,
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
    factors as factors,
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
    grams as grams,
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
    norms as norms,
)
from losses import (
    pairs as pairs,
)
from losses import (
    queues as queues,
)
from losses import (
    relations as relations,
)
from losses import (
    reused as reused,
)
from losses import (
    review as review,
)
from losses import (
    scales as scales,
)
from losses import (
    semantics as semantics,
)
from losses import (
    standardise as standardise,
)
from losses import (
    temperatures as temperatures,
)
from losses import (
    turned as turned,
)
from losses import (
    views as views,
)
from losses.affine import AffineMap, create_channel_map, create_hadamard, create_phi_s_map
from losses.base import LOSSES, Loss, LossInputs, LossOutput, Turned
from losses.classes import CLASS_LOSSES, ClassLoss, create_class_loss
from losses.embeddings import EMBEDDING_LOSSES
from losses.ensembles import combine_answers
from losses.factory import create_loss
from losses.label_free import (
    PATCHES,
    POOLED,
    Embeddings,
    LabelFreeInputs,
    LabelFreeLoss,
    create_label_free_loss,
)
from losses.memories import join_memories
from losses.regression import GAUSSIAN, compute_gaussian_nll, get_regression_loss
from losses.sparse import SparseTeacher
from losses.weighted import WeightedLoss, create_weighted_loss
from losses.yes_or_no import YES_OR_NO, compute_bce

__all__ = [
    "CLASS_LOSSES",
    "EMBEDDING_LOSSES",
    "GAUSSIAN",
    "LOSSES",
    "PATCHES",
    "POOLED",
    "YES_OR_NO",
    "AffineMap",
    "ClassLoss",
    "Embeddings",
    "LabelFreeInputs",
    "LabelFreeLoss",
    "Loss",
    "LossInputs",
    "LossOutput",
    "SparseTeacher",
    "Turned",
    "WeightedLoss",
    "combine_answers",
    "compute_bce",
    "compute_gaussian_nll",
    "create_channel_map",
    "create_class_loss",
    "create_hadamard",
    "create_label_free_loss",
    "create_loss",
    "create_phi_s_map",
    "create_weighted_loss",
    "get_regression_loss",
    "join_memories",
]
