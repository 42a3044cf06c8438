"""What is decided of TorchTPU before torch_tpu is imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from typing import TYPE_CHECKING, Any

from utils.device_use import find_holders, list_device_files
from utils.errors import UserError
from utils.runtime.compile_cache import find_cache, shrink
from utils.runtime.start import DeviceStart, get_planned_size
from utils.runtime.tpu import standin

if TYPE_CHECKING:
    from utils.config.execution import RuntimeSection
    from utils.runtime.processes.children import CreateRuntime, ReplicaWork

# Releases of torch that torch_tpu 0.2.0 is built for.
TORCH_RELEASES = ((2, 11), (2, 15))
_CACHE = "TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT"
# Of the environment: an address for each process of a run on chips; hosts of a slice.
_ADDRESSES, _HOSTS = "TORCH_TPU_SLICEBUILDER_ADDRESSES", "TPU_WORKER_HOSTNAMES"
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
        get_cache_place(section)
        if standin.is_requested():
            standin.find_plugin()
            return
        if not list_chips():
            raise UserError(
                "runtime.device is 'tpu' but no TPU chip is here (/dev/vfio/*); run on a TPU VM, "
                f"or set {standin.VARIABLE}=cpu to try it on the CPU, where no TPU is used"
            )
        if get_planned_size() == 1:  # else the others of this run hold chips, too
            check_holders()
        elif _ADDRESSES not in os.environ:
            raise UserError(
                f"WORLD_SIZE ({os.environ['WORLD_SIZE']}) in the environment says that this is one "
                f"of several processes, but {_ADDRESSES} is not set; before torchrun export what "
                "python -m torch_tpu._internal.distributed.distributed prints, or unset WORLD_SIZE"
            )
        hosts = [name for name in os.environ.get(_HOSTS, "").split(",") if name]
        if get_planned_size() == 1 and len(hosts) > 1 and section.num_processes != 1:
            raise UserError(
                f"{_HOSTS} in the environment names {len(hosts)} hosts, whose processes main.py "
                "does not start; use torchrun on each host (docs/torch_tpu.md), or unset it to "
                "train on this host alone"
            )

    def has_chips(self) -> bool:
        return not standin.is_requested()

    def decides_ranks(self, section: RuntimeSection) -> bool:
        return self.has_chips() and get_planned_size() == 1 and section.num_processes is None

    def count_processes(self, section: RuntimeSection) -> int:
        if not self.has_chips():
            return super().count_processes(section)
        count = _get_hardware().get_tpu_device_count()
        if section.num_processes and section.num_processes > count:
            raise UserError(
                f"runtime.num_processes ({section.num_processes}) exceeds the {count} devices of "
                "this host's TPU chips; lower it"
            )
        return section.num_processes or count

    def launch(self, create: CreateRuntime, work: ReplicaWork) -> int:
        if self.has_chips() and get_planned_size() == 1:
            self._set_launch_environment(work.section)
        return super().launch(create, work)

    def _set_launch_environment(self, section: RuntimeSection) -> None:
        """Tell TorchTPU, before processes start, which of them have which chips."""
        count = self.count_processes(section)
        if count == _get_hardware().get_tpu_device_count() == 1:
            return
        from torch_tpu._internal.distributed.distributed import set_tpu_launch_env

        try:
            set_tpu_launch_env(nproc_per_node=count)
        except RuntimeError as error:
            raise UserError(
                f"runtime.num_processes ({count}) is not a part of this host's TPU chips that "
                "TorchTPU can open; use 1, or leave it out"
            ) from error

    def describe(self) -> str:
        return "tpu" if self.has_chips() else "tpu's stand-in on the CPU, no TPU is used"


def set_compile_cache(section: RuntimeSection) -> None:
    """Set where torch_tpu stores programs, before it is loaded.

    A place that cannot be written is refused here: torch_tpu would abort the process. Programs go
    through a cache in the host's shared memory first, which torch_tpu calls tier 2.
    """
    from utils.storage.places import check_writable, is_remote, to_path

    place = get_cache_place(section)
    if not place or _CACHE in os.environ:
        return
    check_writable(place, "runtime.compile_cache")
    if not is_remote(place) and os.environ.get("RANK", "0") == "0":
        shrink(to_path(place), section.compile_cache_gib)
    os.environ[_CACHE] = place


def get_cache_place(section: RuntimeSection) -> str:
    """Return the directory or URL of compiled programs, empty without one."""
    # Not above: the doctor loads this file where no package is installed.
    from utils.storage.places import is_remote, to_path

    place = find_cache(section, has_chips=not standin.is_requested())
    if place and not is_remote(place):
        return str(to_path(place) / "torch_tpu")
    if place and not place.startswith("gs://"):
        raise UserError(
            f"runtime.compile_cache ({place!r}) is not supported with runtime.device 'tpu'; use a "
            "directory or a gs:// URL"
        )
    return place


def _get_hardware() -> Any:
    """Return TorchTPU's module of chips; unlike its loader it does not open them."""
    from torch_tpu._internal.utils import hardware

    return hardware


def is_installed() -> bool:
    """Return whether torch_tpu is installed, without importing it."""
    return importlib.util.find_spec("torch_tpu") is not None


def list_chips() -> list[str]:
    """List the chips that TorchTPU can open: it knows those below /dev/vfio alone."""
    try:
        return [str(path) for path in list_device_files() if path.parent.name == "vfio"]
    except OSError:
        return []


def check_stacks() -> None:
    """Raise a UserError unless torch fits torch_tpu, and torch_xla is in another environment."""
    has_xla = importlib.util.find_spec("torch_xla") is not None
    clash = find_clash(importlib.metadata.version("torch"), has_xla=has_xla)
    if clash:
        raise UserError(f"runtime.device is 'tpu' but {clash}; {_SETUP}")


def find_clash(torch: str, *, has_xla: bool) -> str:
    """Return why TorchTPU cannot run with a release of torch, or beside torch_xla; else empty."""
    if has_xla:
        return (
            "torch_xla is installed beside torch_tpu, and the two need different releases of torch"
        )
    release = tuple(int(part) for part in torch.split("+", maxsplit=1)[0].split(".")[:2])
    least, most = TORCH_RELEASES
    if least <= release <= most:
        return ""
    return f"torch {torch} is not one of {'.'.join(map(str, least))} to {'.'.join(map(str, most))}"


def check_holders() -> None:
    """Raise a UserError if another process holds a chip: libtpu would end this one."""
    for process, command, file in find_holders(set(list_chips()))[0]:
        if process != str(os.getpid()):
            raise UserError(
                f"runtime.device is 'tpu' but process {process} ({command}) holds {file}; end it, "
                "or wait for it"
            )
