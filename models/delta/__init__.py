"""Delta attention: rules with a state of fixed size, token by token and a chunk at a time."""

from models.delta.chunked import chunk_delta_rule
from models.delta.dplr import chunk_dplr
from models.delta.inputs import DeltaInputs, DplrInputs
from models.delta.layout import CoreOptions
from models.delta.recurrence import recur_delta_rule, recur_dplr

__all__ = [
    "CoreOptions",
    "DeltaInputs",
    "DplrInputs",
    "chunk_delta_rule",
    "chunk_dplr",
    "recur_delta_rule",
    "recur_dplr",
]
