"""TensorFlow as the input pipeline uses it: quiet, on the CPU, one thread a core."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from utils.programs import pause_collection

_HIDDEN_DEVICES = ("GPU", "TPU")
# What TensorFlow imports if it is there and does without if not: networks, notebooks and plots,
# half of its start-up. `tf.keras` is loaded all the same when somebody asks for it.
_OPTIONAL = ("IPython", "h5py", "jax", "keras", "matplotlib", "pandas", "scipy", "sklearn")


def import_tensorflow() -> Any:
    """The tensorflow module with every accelerator hidden from it.

    Call it after the runtime exists: TensorFlow before torch_xla aborts the process.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # Its kernels serve networks; where they are on, TensorFlow says so twice, at any log level.
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    if "tensorflow" in sys.modules:
        import tensorflow as tf
    else:
        with _hide_packages(_OPTIONAL), pause_collection():
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


class _Hiding(Loader):
    """Finder and loader of packages that are there, but not imported by the thread that made it."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = frozenset(packages)
        self._thread = threading.get_ident()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Where a hidden package lies, with a loader that refuses; of all else nothing."""
        is_hidden = name in self._packages and threading.get_ident() == self._thread
        spec = PathFinder.find_spec(name, path, target) if is_hidden else None
        if spec is not None:
            spec.loader = self
        return spec

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is imported.

        Raises:
          ModuleNotFoundError: always, as if the package were not there.
        """
        raise ModuleNotFoundError(f"{module.__name__} is hidden from what is imported now")


@contextlib.contextmanager
def _hide_packages(packages: Sequence[str]) -> Iterator[None]:
    """Let imports of this thread find no such packages, but those that are imported already."""
    hiding = _Hiding(packages)
    sys.meta_path.insert(0, hiding)
    try:
        yield
    finally:
        sys.meta_path.remove(hiding)
