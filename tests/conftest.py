"""Test set-up: the XLA device exists before any backward and before TensorFlow."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("MPLBACKEND", "Agg")

# A backward before the XLA device exists makes the first XLA backward die, and TensorFlow imported
# before torch_xla aborts Python: so the device comes first, for all tests.
if importlib.util.find_spec("torch_xla") is not None:
    import torch_xla

    torch_xla.device()
