"""Where a run executes: `launch` starts it, `create_runtime` gives the parts their device."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.errors import UserError

if TYPE_CHECKING:
    from utils.config.sections import RuntimeSection
    from utils.runtime.base import Runtime

_RUNTIMES = {
    "cpu": ("utils.runtime.cpu", "CpuRuntime"),
    "xla": ("utils.runtime.xla", "XlaRuntime"),
}


def choose_device(section: RuntimeSection) -> str:
    """The runtime's name behind `runtime.device`, without touching a device.

    Raises:
      UserError: the runtime cannot work on this machine.
    """
    name = section.device
    has_xla = importlib.util.find_spec("torch_xla") is not None
    if name == "auto":
        return "xla" if has_xla else "cpu"
    if name == "xla" and not has_xla:
        raise UserError(
            "runtime.device is 'xla' but torch_xla is not installed; pip install -r "
            "requirements.txt, or use --runtime.device=cpu"
        )
    if name not in _RUNTIMES:
        raise UserError(f"runtime.device {name!r} is not there yet; use xla or cpu")
    return name


def prepare_environment(name: str) -> None:
    """Set what must stand in the environment before the backend is imported."""
    if name == "xla" and "PJRT_DEVICE" not in os.environ and not _has_tpu():
        os.environ["PJRT_DEVICE"] = "CPU"


def launch(section: RuntimeSection, worker: Callable[..., None], *args: Any) -> None:
    """Run `worker(runtime, *args)` on every replica.

    `worker` must be a module-level function: replicas may be processes of their own.
    """
    name = choose_device(section)
    prepare_environment(name)
    module, class_name = _RUNTIMES[name]
    getattr(importlib.import_module(module), class_name).launch(section, worker, *args)


def create_runtime(section: RuntimeSection) -> Runtime:
    """The runtime of this process, for tests and tools that run one replica in place."""
    name = choose_device(section)
    prepare_environment(name)
    module, class_name = _RUNTIMES[name]
    return getattr(importlib.import_module(module), class_name)(section)


def _has_tpu() -> bool:
    """Whether the kernel shows TPU chips; reads two directories, no driver."""
    return any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))
