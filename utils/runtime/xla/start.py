"""What is decided of XLA before torch_xla is imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from typing import TYPE_CHECKING

from utils.device_use import list_device_files
from utils.errors import UserError
from utils.runtime.processes.children import ReplicaWork
from utils.runtime.start import DeviceStart, check_group

if TYPE_CHECKING:
    from utils.config.execution import RuntimeSection
    from utils.runtime.processes.children import CreateRuntime

# Variables with which torch_xla stores float32 tensors in 16 bits.
_NARROWING = (
    "XLA_USE_BF16",
    "XLA_DOWNCAST_BF16",
    "XLA_USE_F16",
    "XLA_USE_FP16",
    "XLA_DOWNCAST_FP16",
)


class XlaStart(DeviceStart):
    """XLA on the chips of a TPU, or on the CPU."""

    bakes_numbers = True

    def is_available(self) -> bool:
        return importlib.util.find_spec("torch_xla") is not None

    def check(self, section: RuntimeSection) -> None:
        if not self.is_available():
            raise UserError(
                "runtime.device is 'xla' but torch_xla is not installed; pip install -r "
                "requirements.txt, or use --runtime.device=cpu"
            )
        _check_versions()
        for variable in _NARROWING:
            if os.environ.get(variable, "0") not in ("", "0"):
                raise UserError(
                    f"{variable} ({os.environ[variable]!r}) in the environment turns weights and "
                    "moments into 16 bits, too; unset it and use runtime.precision=bf16"
                )
        _check_pjrt()
        if not has_tpu():  # chips find each other by themselves
            check_group()
        elif os.environ.get("PJRT_DEVICE") != "CPU" and (section.num_processes or 1) > 1:
            raise UserError(
                f"runtime.num_processes ({section.num_processes}) is not for a TPU, which has a "
                "process for each chip; leave it out"
            )

    def prepare_environment(self) -> None:
        # Hides forty warnings a run that GSPMD will be replaced one day; errors are shown.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        if "PJRT_DEVICE" not in os.environ and not has_tpu():
            os.environ["PJRT_DEVICE"] = "CPU"

    def prepare_profile(self) -> None:
        os.environ.setdefault("XLA_HLO_DEBUG", "1")

    def has_chips(self) -> bool:
        pjrt = os.environ.get("PJRT_DEVICE")
        return pjrt == "TPU" or (pjrt is None and has_tpu())

    def describe(self) -> str:
        return "xla on TPU" if self.has_chips() else "xla on the CPU, no TPU is used"

    def launch(self, create: CreateRuntime, work: ReplicaWork) -> int:
        if not self.has_chips() or work.section.parallel == "spmd":
            return super().launch(create, work)
        from utils.runtime.xla.chips import launch_on_chips

        return launch_on_chips(work)


def has_tpu() -> bool:
    """Return whether the kernel shows TPU chips; reads two directories, no driver."""
    try:
        return bool(list_device_files())
    except OSError:
        return False


def _check_pjrt() -> None:
    pjrt = os.environ.get("PJRT_DEVICE")
    if pjrt == "TPU" and not has_tpu():
        raise UserError(
            "PJRT_DEVICE ('TPU') in the environment, but no TPU chip is here (/dev/accel*, "
            "/dev/vfio/*); unset it to use XLA on the CPU, or run python -m tools.doctor"
        )
    if pjrt not in (None, "CPU", "TPU"):
        raise UserError(
            f"PJRT_DEVICE ({pjrt!r}) contradicts runtime.device='xla'; unset it, or set it to "
            "TPU or CPU"
        )


def _check_versions() -> None:
    """Check that torch_xla runs with the torch it is built against, before it fails to load."""
    torch, xla = (importlib.metadata.version(name) for name in ("torch", "torch_xla"))
    if torch.split(".")[:2] != xla.split(".")[:2]:
        required = ".".join(xla.split("+")[0].split(".")[:3])
        raise UserError(
            f"torch {torch} does not pair with torch_xla {xla}; pip install torch=={required} "
            f"torch_xla=={required}, or use runtime.device=cpu or cuda"
        )
