"""TensorFlow as the input pipeline uses it: quiet, on the CPU, one thread a core."""

from __future__ import annotations

import os
from typing import Any

_HIDDEN_DEVICES = ("GPU", "TPU")


def import_tensorflow() -> Any:
    """The tensorflow module with every accelerator hidden from it.

    Call it after the runtime exists: TensorFlow before torch_xla aborts the process.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # Its kernels serve networks; where they are on, TensorFlow says so twice, at any log level.
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    import tensorflow as tf

    for kind in _HIDDEN_DEVICES:
        try:
            tf.config.set_visible_devices([], kind)
        except RuntimeError:
            # Already in use by the program around us; then it is theirs to have hidden them.
            continue
    return tf


def get_thread_count(threads: int = 0) -> int:
    """Threads of a pipeline; 0: as many as cores that this process may run on."""
    if threads:
        return threads
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
