"""Weights behind a path, whatever stands there: a file, a run or a checkpoint.

`source` tells what a path means, `files` reads and writes files of weights, `load` brings weights
into a model.
"""

from utils.weights.files import EXPORT_FILE, write_weights
from utils.weights.load import check_fitting, load_fitting, load_weights
from utils.weights.source import Weights, open_weights, refuse_other_sources

__all__ = [
    "EXPORT_FILE",
    "Weights",
    "check_fitting",
    "load_fitting",
    "load_weights",
    "open_weights",
    "refuse_other_sources",
    "write_weights",
]
