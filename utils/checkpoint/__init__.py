"""Checkpoints: plain CPU tensors and JSON, whole or not there.

`files` writes and reads one checkpoint, `manager` those of a run, `find` tells which one a path
means, `state` turns a train state into tensors and facts and back.
"""

from utils.checkpoint.files import (
    FORMAT_VERSION,
    STATE_FILE,
    CheckpointError,
    Location,
    Tensors,
    inspect_checkpoint,
    load_checkpoint,
    read_table,
    verify_checkpoint,
    write_checkpoint,
)
from utils.checkpoint.find import (
    find_checkpoint,
    has_checkpoints,
    iterate_checkpoints,
    load_newest,
    read_best_step,
    read_weight_table,
    read_weights,
)
from utils.checkpoint.manager import BEST_FILE, CheckpointManager
from utils.checkpoint.state import (
    check_init,
    collect_state,
    compare_tensors,
    init_weights,
    restore_state,
)

__all__ = [
    "BEST_FILE",
    "FORMAT_VERSION",
    "STATE_FILE",
    "CheckpointError",
    "CheckpointManager",
    "Location",
    "Tensors",
    "check_init",
    "collect_state",
    "compare_tensors",
    "find_checkpoint",
    "has_checkpoints",
    "init_weights",
    "inspect_checkpoint",
    "iterate_checkpoints",
    "load_checkpoint",
    "load_newest",
    "read_best_step",
    "read_table",
    "read_weight_table",
    "read_weights",
    "restore_state",
    "verify_checkpoint",
    "write_checkpoint",
]
