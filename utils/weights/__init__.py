"""Weights behind a path, whatever stands there: a file, a run, a checkpoint, a shared model.

`opening` tells what a path means, `source`, `archives` and `hub` are its forms, `files` reads and
writes files of weights, `fitting` makes them fit a model, `meaning` says what tensors mean beside
names and shapes, `load` brings them in, `beside` finds the run that they belong to, `adapters`
makes what was added for training part of the weights, `class_names` compares what two sides call
their classes.
"""

from utils.weights.adapters import (
    DOWN,
    SCALE,
    UP,
    WIDENED,
    drop_adapters,
    is_adapter,
    merge_adapters,
)
from utils.weights.beside import find_run_folder, read_run_config
from utils.weights.class_names import (
    BY_NAME,
    ClassSide,
    get_label_names,
    map_classes_by_name,
    match_class_names,
    read_class_names,
    require_same_classes,
    warn_if_one_sided,
)
from utils.weights.files import EXPORT_FILE, write_pickled, write_weights
from utils.weights.fitting import Fit, FitRules, list_head_names
from utils.weights.hub import ask_hub, is_shared
from utils.weights.load import find_other_variant, load_weights
from utils.weights.meaning import ARGUMENTS, Meaning, ModelArguments, find_meanings
from utils.weights.opening import open_weights
from utils.weights.source import Weights

__all__ = [
    "ARGUMENTS",
    "BY_NAME",
    "DOWN",
    "EXPORT_FILE",
    "SCALE",
    "UP",
    "WIDENED",
    "ClassSide",
    "Fit",
    "FitRules",
    "Meaning",
    "ModelArguments",
    "Weights",
    "ask_hub",
    "drop_adapters",
    "find_meanings",
    "find_other_variant",
    "find_run_folder",
    "get_label_names",
    "is_adapter",
    "is_shared",
    "list_head_names",
    "load_weights",
    "map_classes_by_name",
    "match_class_names",
    "merge_adapters",
    "open_weights",
    "read_class_names",
    "read_run_config",
    "require_same_classes",
    "warn_if_one_sided",
    "write_pickled",
    "write_weights",
]
