"""Checkpoints: plain CPU tensors and JSON, whole or not there.

`files` writes and reads one checkpoint, `manager` those of a run, `find` tells which one a path
means, `state` turns a train state into tensors and facts and back, `fit` compares tensors by name.
"""

from utils.checkpoint.files import (
    STATE_FILE,
    CheckpointError,
    Location,
    Tensors,
    inspect_checkpoint,
    load_checkpoint,
    load_part,
    verify_checkpoint,
    write_checkpoint,
)
from utils.checkpoint.find import (
    find_checkpoint,
    has_checkpoints,
    iterate_checkpoints,
    load_newest,
    read_best_step,
)
from utils.checkpoint.fit import Kind, Table, TensorDiff, compare_tensors, get_kind
from utils.checkpoint.manager import BEST_FILE, CheckpointManager
from utils.checkpoint.state import collect_state, copy_tensors, restore_state

__all__ = [
    "BEST_FILE",
    "STATE_FILE",
    "CheckpointError",
    "CheckpointManager",
    "Kind",
    "Location",
    "Table",
    "TensorDiff",
    "Tensors",
    "collect_state",
    "compare_tensors",
    "copy_tensors",
    "find_checkpoint",
    "get_kind",
    "has_checkpoints",
    "inspect_checkpoint",
    "iterate_checkpoints",
    "load_checkpoint",
    "load_newest",
    "load_part",
    "read_best_step",
    "restore_state",
    "verify_checkpoint",
    "write_checkpoint",
]
