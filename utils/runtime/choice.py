"""Chooses the runtime and its number of ranks, before a device is touched."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from utils.config.metadata import check_devices
from utils.errors import UserError

if TYPE_CHECKING:
    from utils.config.execution import RuntimeSection

# Variables with which torch_xla narrows float32 tensors behind everybody's back.
_NARROWING = (
    "XLA_USE_BF16",
    "XLA_DOWNCAST_BF16",
    "XLA_USE_F16",
    "XLA_USE_FP16",
    "XLA_DOWNCAST_FP16",
)
# What torch.compile may compile with; the first is `auto`.
_NATIVE_COMPILERS = ("inductor", "aot_eager", "eager")
_COMPILERS = {"cpu": _NATIVE_COMPILERS, "cuda": _NATIVE_COMPILERS, "xla": ("openxla",)}
_RENDEZVOUS = ("RANK", "MASTER_ADDR", "MASTER_PORT")


def choose_device(section: RuntimeSection) -> str:
    """The runtime's name behind `runtime.device`, without touching a device.

    Raises:
      UserError: the runtime cannot work on this machine, or not with these keys.
    """
    name = section.device
    has_xla = importlib.util.find_spec("torch_xla") is not None
    if name == "auto":
        name = "xla" if has_xla else "cuda" if _has_cuda() else "cpu"
    elif name == "xla" and not has_xla:
        raise UserError(
            "runtime.device is 'xla' but torch_xla is not installed; pip install -r "
            "requirements.txt, or use --runtime.device=cpu"
        )
    elif name == "cuda" and not _has_cuda():
        raise UserError(
            "runtime.device is 'cuda' but PyTorch sees no NVIDIA GPU here; use another device, or "
            "a build of torch with CUDA on a machine that has one"
        )
    _check_environment(name)
    _check_keys(section, name)
    return name


def choose_compiler(section: RuntimeSection, name: str) -> str:
    """The backend of torch.compile behind `runtime.compile_backend`, on a runtime.

    Raises:
      UserError: the runtime has no such backend, or it would not be used.
    """
    backend, known = section.compile_backend, _COMPILERS[name]
    if backend not in ("auto", *known):
        raise UserError(
            f"runtime.compile_backend ({backend!r}) works not on {name!r}, which has "
            f"{', '.join(known)}; choose one of them or auto"
        )
    if backend != "auto" and not section.compile:
        raise UserError(
            f"runtime.compile_backend ({backend!r}) compiles nothing without runtime.compile; set "
            "runtime.compile=true, or leave the backend out"
        )
    if section.compile and section.parallel == "spmd":
        raise UserError(
            "runtime.compile (True) works not with runtime.parallel 'spmd', whose partitioner "
            "needs the step as a whole, as xla compiles it by itself; leave it out"
        )
    chosen = known[0] if backend == "auto" else backend
    if section.compile and (chosen, name) == ("inductor", "cpu"):
        _require_cpp_compiler(backend)
    return chosen


def _require_cpp_compiler(backend: str) -> None:
    """What inductor makes for a CPU is C++; it looks for a compiler in these places, too."""
    asked = os.environ.get("CXX")
    found = asked or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(found) is None and not os.environ.get("TORCH_INDUCTOR_INSTALL_GXX"):
        place = f"CXX ({asked!r}) is none" if asked else f"there is no {found} on the PATH"
        raise UserError(
            f"runtime.compile_backend ({backend!r}) compiles by inductor, which needs a C++ "
            f"compiler, and {place}; install one, such as g++, set CXX to one, choose "
            "aot_eager or eager, or leave runtime.compile out"
        )


def count_planned_ranks(section: RuntimeSection, name: str) -> int:
    """Input processes that are known before a device is touched; 1 where the device decides."""
    if section.parallel == "spmd":
        return 1
    return max(get_planned_size(), _get_asked(section, name) or 1)


def find_planned_ranks(section: RuntimeSection, name: str) -> int | None:
    """Input processes as `count_planned_ranks`, but none where the device decides."""
    has_gpus = name == "cuda" and get_planned_size() == 1 and section.num_processes is None
    if section.parallel == "spmd" or has_chips(name) or has_gpus:
        return None
    return count_planned_ranks(section, name)


def count_processes(section: RuntimeSection, name: str) -> int:
    """Processes that this host starts for a run.

    Raises:
      UserError: they are more than there are GPUs.
    """
    if section.parallel == "spmd":
        return 1
    if name != "cuda":
        return _get_asked(section, name) or 1
    import torch

    available = torch.cuda.device_count()
    if section.num_processes and section.num_processes > available:
        raise UserError(
            f"runtime.num_processes ({section.num_processes}) exceeds the {available} GPUs of "
            "this host; lower it"
        )
    return section.num_processes or available


def _get_asked(section: RuntimeSection, name: str) -> int | None:
    """Processes that the configuration asks for; none: it leaves them to the device."""
    if name == "cuda" or has_chips(name):
        return section.num_processes
    return section.num_processes or section.cpu_processes


def get_planned_size() -> int:
    """The group's size as torchrun's variables say; 1 without them.

    Raises:
      UserError: they say no number.
    """
    text = os.environ.get("WORLD_SIZE", "")
    if text and not text.isdecimal():
        raise UserError(
            f"WORLD_SIZE ({text!r}) in the environment is no number; unset it or mend it"
        )
    return int(text) if text else 1


def has_chips(name: str) -> bool:
    """Whether a runtime will run on the chips of a TPU."""
    pjrt = os.environ.get("PJRT_DEVICE")
    return name == "xla" and (pjrt == "TPU" or (pjrt is None and _has_tpu()))


def bakes_numbers(name: str) -> bool:
    """Whether a runtime's steps are graphs in which Python's 0 and 1 are constants."""
    return name == "xla"


def describe_device(name: str) -> str:
    """A runtime's name, with what xla stands for here."""
    if name != "xla":
        return name
    return "xla on TPU" if has_chips(name) else "xla on the CPU, no TPU is used"


def is_silent_rank() -> bool:
    """Whether another process of the group says what is wrong with all of them alike."""
    return os.environ.get("RANK", "0") not in ("", "0")


def prepare_environment(name: str) -> None:
    """Set what must stand in the environment before the backend is imported."""
    if name != "xla":
        return
    # Forty warnings a run that GSPMD will be replaced one day help nobody; errors are shown.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if "PJRT_DEVICE" not in os.environ and not _has_tpu():
        os.environ["PJRT_DEVICE"] = "CPU"


def _check_environment(name: str) -> None:
    pjrt = os.environ.get("PJRT_DEVICE")
    if name == "xla":
        _check_versions()
        for variable in _NARROWING:
            if os.environ.get(variable, "0") not in ("", "0"):
                raise UserError(
                    f"{variable} ({os.environ[variable]!r}) in the environment turns weights and "
                    "moments into 16 bits, too; unset it and use runtime.precision=bf16"
                )
        if pjrt == "TPU" and not _has_tpu():
            raise UserError(
                "PJRT_DEVICE ('TPU') in the environment, but no TPU chip is here (/dev/accel*, "
                "/dev/vfio/*); unset it to use XLA on the CPU, or ask python -m tools.doctor"
            )
        if pjrt not in (None, "CPU", "TPU"):
            raise UserError(
                f"PJRT_DEVICE ({pjrt!r}) contradicts runtime.device='xla'; unset it, or set it to "
                "TPU or CPU"
            )
    elif pjrt == "TPU":
        raise UserError(
            f"PJRT_DEVICE ('TPU') contradicts runtime.device={name!r}; unset it, or set "
            "runtime.device=xla"
        )
    if name != "xla" or not _has_tpu():  # chips find each other by themselves
        _check_group()


def _check_group() -> None:
    """Whoever says that this is one of several processes must say where they meet."""
    missing = [name for name in _RENDEZVOUS if not os.environ.get(name)]
    if get_planned_size() > 1 and missing:
        raise UserError(
            f"WORLD_SIZE ({os.environ['WORLD_SIZE']}) in the environment says that this is one of "
            f"several processes, but {' and '.join(missing)} is not set; start them with torchrun, "
            "or unset WORLD_SIZE"
        )


def _check_versions() -> None:
    """torch_xla is built against one torch: the other ones die with an undefined symbol."""
    torch, xla = (importlib.metadata.version(name) for name in ("torch", "torch_xla"))
    if torch.split(".")[:2] != xla.split(".")[:2]:
        wanted = ".".join(xla.split("+")[0].split(".")[:3])
        raise UserError(
            f"torch {torch} does not pair with torch_xla {xla}; pip install torch=={wanted} "
            f"torch_xla=={wanted}, or use runtime.device=cpu or cuda"
        )


def _check_keys(section: RuntimeSection, name: str) -> None:
    """Keys that this runtime cannot honour are refused, not ignored."""
    check_devices(name, runtime=section)
    choose_compiler(section, name)
    is_tpu = name == "xla" and os.environ.get("PJRT_DEVICE") != "CPU" and _has_tpu()
    if (section.num_processes or 1) > 1 and is_tpu:
        raise UserError(
            f"runtime.num_processes ({section.num_processes}) is not for a TPU, which has a "
            "process for each chip; leave it out"
        )


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _has_tpu() -> bool:
    """Whether the kernel shows TPU chips; reads two directories, no driver."""
    return any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))
