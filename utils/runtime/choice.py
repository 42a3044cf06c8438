"""Chooses the device and its number of ranks, before a backend is imported."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING

from utils.config.devices import DEVICES, FALLBACK, get_devices
from utils.config.metadata import check_devices
from utils.errors import UserError, get_hint
from utils.runtime.start import get_planned_size, get_start

if TYPE_CHECKING:
    from utils.config.execution import RuntimeSection


def choose_device(section: RuntimeSection) -> str:
    """Return the name of the device behind `runtime.device`, without touching it.

    UserError if it cannot work on this machine, or not with these keys.
    """
    # Where torch_tpu is installed, `import torch` would open libtpu, whatever the device.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    name = section.device
    if name == "auto":
        others = (name for name in DEVICES if name != FALLBACK)
        name = next((name for name in others if get_start(name).is_available()), FALLBACK)
    if name not in DEVICES:
        raise UserError(f"unknown runtime.device {name!r}; {get_hint(name, DEVICES)}")
    get_start(name).check(section)
    check_devices(name, runtime=section)
    if section.parallel == "fsdp" and "fsdp" not in DEVICES[name].modes:
        raise UserError(
            f"runtime.parallel ('fsdp') works on {' and '.join(get_devices('fsdp'))}, not on "
            f"{name!r}: use process, or on xla spmd with runtime.mesh_fsdp"
        )
    if section.parallel == "fsdp" and section.overlap:
        raise UserError(
            "runtime.overlap (True) is not supported with runtime.parallel 'fsdp', which sums "
            "gradients during the backward pass by itself; leave it out"
        )
    choose_compiler(section, name)
    return name


def choose_compiler(section: RuntimeSection, name: str) -> str:
    """Return the backend of torch.compile behind `runtime.compile_backend`, on a device.

    UserError if the device has no such backend, or it would not be used.
    """
    backend, supported = section.compile_backend, DEVICES[name].compilers
    if backend not in ("auto", *supported) and not _is_listed(backend, name):
        raise UserError(
            f"runtime.compile_backend ({backend!r}) is not supported on {name!r}, which has "
            f"{', '.join(supported)}; choose one of them or auto"
        )
    if backend != "auto" and not section.compile:
        raise UserError(
            f"runtime.compile_backend ({backend!r}) compiles nothing without runtime.compile; set "
            "runtime.compile=true, or leave the backend out"
        )
    if section.compile and section.parallel != "process":
        reasons = {
            "spmd": "whose partitioner needs the step as a whole, as xla compiles it by itself",
            "fsdp": "whose weights are joined by operations of their own",
        }
        raise UserError(
            f"runtime.compile (True) is not supported with runtime.parallel {section.parallel!r}, "
            f"{reasons[section.parallel]}; leave it out"
        )
    chosen = supported[0] if backend == "auto" else backend
    # Inductor writes C++ for whatever has no compiler of its own.
    if section.compile and chosen == "inductor" and not get_start(name).is_accelerator():
        _require_cpp_compiler(backend)
    return chosen


def count_planned_ranks(section: RuntimeSection, name: str) -> int:
    """Count input processes that are known beforehand; 1 where the device decides."""
    if section.parallel == "spmd":
        return 1
    return max(get_planned_size(), get_start(name).get_requested(section) or 1)


def find_planned_ranks(section: RuntimeSection, name: str) -> int | None:
    """Count input processes as `count_planned_ranks`; None where the device decides."""
    if section.parallel == "spmd" or get_start(name).decides_ranks(section):
        return None
    return count_planned_ranks(section, name)


def is_silent_rank() -> bool:
    """Return whether another process of the group reports errors that all of them have."""
    return os.environ.get("RANK", "0") not in ("", "0")


def _is_listed(backend: str, name: str) -> bool:
    """Return whether a device takes a backend that is in no row but one of torch._dynamo's."""
    if "dynamo" not in DEVICES[name].modes or any(backend in d.compilers for d in DEVICES.values()):
        return False
    import torch._dynamo

    return backend in torch._dynamo.list_backends()


def _require_cpp_compiler(backend: str) -> None:
    """Raise a UserError unless inductor will find a C++ compiler, looking where it looks."""
    requested = os.environ.get("CXX")
    compiler = requested or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None and not os.environ.get("TORCH_INDUCTOR_INSTALL_GXX"):
        reason = (
            f"CXX ({requested!r}) is not a program"
            if requested
            else f"there is no {compiler} on the PATH"
        )
        raise UserError(
            f"runtime.compile_backend ({backend!r}) compiles by inductor, which needs a C++ "
            f"compiler, and {reason}; install one, such as g++, set CXX to one, choose "
            "aot_eager or eager, or leave runtime.compile out"
        )
