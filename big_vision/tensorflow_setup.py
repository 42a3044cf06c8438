"""TensorFlow for the input pipeline: imported on first use, quiet, on the CPU, a thread a core."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

from utils.programs import pause_collection

_HIDDEN_DEVICES = ("GPU", "TPU")
# Packages that TensorFlow imports only if they exist: networks, notebooks and plots, half of its
# start-up. `tf.keras` is still loaded on use.
_OPTIONAL = ("IPython", "h5py", "jax", "keras", "matplotlib", "pandas", "scipy", "sklearn")


class _LazyTensorFlow:
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # introspection must not import TensorFlow
            raise AttributeError(name)
        return getattr(importlib.import_module("tensorflow"), name)


# TensorFlow must not be imported before the device exists: the first use of `tf` imports it.
if TYPE_CHECKING:
    import tensorflow as tf
else:
    tf = _LazyTensorFlow()


def import_tensorflow() -> Any:
    """Import tensorflow with every accelerator hidden from it.

    Call it after the runtime exists: TensorFlow before torch_xla aborts the process.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # Its kernels serve networks; if enabled, TensorFlow logs so twice, at any log level.
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
            # Already in use by the calling program, which then had to hide them.
            continue
    return tf


def get_thread_count(threads: int = 0) -> int:
    """Return the threads of a pipeline; by default the cores that this process may use."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count()
    return threads or cores or 1


class _Hiding(Loader):
    """Hides installed packages from imports of the thread that created it."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = frozenset(packages)
        self._thread = threading.get_ident()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a hidden package's spec with a loader that raises; None for others."""
        is_hidden = name in self._packages and threading.get_ident() == self._thread
        spec = PathFinder.find_spec(name, path, target) if is_hidden else None
        if spec is not None:
            spec.loader = self
        return spec

    def exec_module(self, module: ModuleType) -> None:
        """Raise ModuleNotFoundError, as if the package were not installed."""
        raise ModuleNotFoundError(f"{module.__name__} is hidden from what is imported now")


@contextlib.contextmanager
def _hide_packages(packages: Sequence[str]) -> Iterator[None]:
    """Hide packages from imports of this thread, except those that are imported already."""
    hiding = _Hiding(packages)
    sys.meta_path.insert(0, hiding)
    try:
        yield
    finally:
        sys.meta_path.remove(hiding)


def read_tfds_features(name: str, root: str) -> Any:
    """Return the features of data.name, also without its files; imports TensorFlow.

    Raises:
      Exception: whatever TFDS raises for a name that it does not know.
    """
    import tensorflow_datasets as tfds

    try:
        builder = tfds.builder(name, data_dir=root or None)
    except Exception:
        builder = tfds.builder(name)
    return builder.info.features
