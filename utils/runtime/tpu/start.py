"""What is decided of TorchTPU before torch_tpu is imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

from utils.errors import UserError
from utils.runtime.start import DeviceStart
from utils.runtime.tpu import standin

if TYPE_CHECKING:
    from utils.config.execution import RuntimeSection

# Releases of torch that torch_tpu 0.2.0 is built for.
TORCH_RELEASES = ((2, 11), (2, 15))
_SETUP = "run bash run_commands.sh setup --torch-tpu"


class TpuStart(DeviceStart):
    """TPU chips by TorchTPU, or its stand-in on the CPU."""

    bakes_numbers = True

    def is_available(self) -> bool:
        return is_installed() and bool(list_chips())

    def check(self, section: RuntimeSection) -> None:
        super().check(section)
        if not is_installed():
            raise UserError(
                f"runtime.device is 'tpu' but torch_tpu is not installed; {_SETUP}, or use "
                "runtime.device=xla or cpu"
            )
        check_stacks()
        if standin.is_requested():
            standin.find_plugin()
            return
        if not list_chips():
            raise UserError(
                "runtime.device is 'tpu' but no TPU chip is here (/dev/vfio/*); run on a TPU VM, "
                f"or set {standin.VARIABLE}=cpu to try it on the CPU, where no TPU is used"
            )
        check_holders()

    def has_chips(self) -> bool:
        return not standin.is_requested()

    def describe(self) -> str:
        return "tpu" if self.has_chips() else "tpu's stand-in on the CPU, no TPU is used"


def is_installed() -> bool:
    """Return whether torch_tpu is installed, without importing it."""
    return importlib.util.find_spec("torch_tpu") is not None


def list_chips(root: Path = Path("/")) -> list[Path]:
    """List the device files of chips that libtpu can open; no driver is asked."""
    return sorted((root / "dev/vfio").glob("[0-9]*"))


def check_stacks() -> None:
    """Raise a UserError unless torch fits torch_tpu, and torch_xla is in another environment."""
    if importlib.util.find_spec("torch_xla") is not None:
        raise UserError(
            "runtime.device is 'tpu' but torch_xla is installed beside torch_tpu, and the two need "
            f"different releases of torch; {_SETUP}, which makes an environment of its own"
        )
    version = importlib.metadata.version("torch")
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    least, most = TORCH_RELEASES
    if not least <= release <= most:
        raise UserError(
            f"runtime.device is 'tpu' but torch {version} is not one of "
            f"{'.'.join(map(str, least))} to {'.'.join(map(str, most))}; {_SETUP}"
        )


def check_holders() -> None:
    """Raise a UserError if another process holds a chip: libtpu would end this one."""
    chips = list_chips()
    for process in Path("/proc").glob("[0-9]*"):
        held = next((path for path in chips if is_open_in(process, path)), None)
        if held is not None and process.name != str(os.getpid()):
            raise UserError(
                f"runtime.device is 'tpu' but process {process.name} holds {held}; end it, or "
                "wait for it"
            )


def is_open_in(process: Path, path: Path) -> bool:
    """Return whether a process below /proc has a file open; False if it may not be read."""
    try:
        return any(link.readlink() == path for link in (process / "fd").iterdir())
    except OSError:  # it ended, or belongs to somebody else
        return False
