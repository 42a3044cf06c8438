"""What is decided of a device before its backend is imported."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from utils.config.devices import DEVICES
from utils.errors import UserError
from utils.registry import load_object

if TYPE_CHECKING:
    from utils.config.execution import RuntimeSection
    from utils.runtime.processes.children import CreateRuntime, ReplicaWork

_RENDEZVOUS = ("RANK", "MASTER_ADDR", "MASTER_PORT")


class DeviceStart:
    """Checks a device, sets its environment and starts its processes; as it is, the CPU's."""

    # True if its steps are graphs in which Python's 0 and 1 are constants.
    bakes_numbers = False

    def __init__(self, name: str) -> None:
        self.name = name

    def is_available(self) -> bool:
        """Return whether `runtime.device: auto` may choose the device on this machine."""
        return True

    def check(self, section: RuntimeSection) -> None:
        """Raise a UserError unless this machine, its variables and the keys allow the device."""
        if os.environ.get("PJRT_DEVICE") == "TPU":
            raise UserError(
                f"PJRT_DEVICE ('TPU') contradicts runtime.device={self.name!r}; unset it, or set "
                "runtime.device=xla"
            )
        check_group()

    def prepare_environment(self) -> None:
        """Set the variables that the backend reads when it is imported."""

    def prepare_profile(self) -> None:
        """Set the variables with which the backend names operations by their modules."""

    def has_chips(self) -> bool:
        """Return whether the device will run on the chips of a TPU."""
        return False

    def is_accelerator(self) -> bool:
        """Return whether it has hardware with a process each, so that `cpu_processes` is unused."""
        return self.has_chips()

    def decides_ranks(self, section: RuntimeSection) -> bool:
        """Return whether the number of ranks is known only when the device is opened."""
        return self.has_chips()

    def get_requested(self, section: RuntimeSection) -> int | None:
        """Return the processes that the configuration requests; None if the device decides."""
        return section.num_processes or (None if self.is_accelerator() else section.cpu_processes)

    def count_processes(self, section: RuntimeSection) -> int:
        """Return how many processes this host starts; UserError if it has fewer devices."""
        return self.get_requested(section) or 1

    def describe(self) -> str:
        """Return the device's name, with the hardware where the name leaves it open."""
        return self.name

    def launch(self, create: CreateRuntime, work: ReplicaWork) -> int:
        """Run the work on each replica, in this process or in several; return the exit code."""
        from utils.runtime.processes.children import launch_processes, run_on

        # In a group that torchrun started this process is one rank.
        is_single = work.section.parallel == "spmd" or get_planned_size() > 1
        count = 1 if is_single else self.count_processes(work.section)
        if count == 1:
            return run_on(create, work)
        return launch_processes(count, work.section.timeout_s, run_on, create, work)


def get_start(name: str) -> DeviceStart:
    """Create the `DeviceStart` of a device; its backend is not imported."""
    return load_object(DEVICES[name].start)(name)


def get_planned_size() -> int:
    """Return the group's size by torchrun's variables, or 1; UserError for another WORLD_SIZE."""
    text = os.environ.get("WORLD_SIZE", "")
    if text and not text.isdecimal():
        raise UserError(
            f"WORLD_SIZE ({text!r}) in the environment is not a number; unset or correct it"
        )
    return int(text) if text else 1


def check_group() -> None:
    """Raise a UserError if WORLD_SIZE is above 1 and a variable of the rendezvous is missing."""
    missing = [name for name in _RENDEZVOUS if not os.environ.get(name)]
    if get_planned_size() > 1 and missing:
        raise UserError(
            f"WORLD_SIZE ({os.environ['WORLD_SIZE']}) in the environment says that this is one of "
            f"several processes, but {' and '.join(missing)} is not set; start them with torchrun, "
            "or unset WORLD_SIZE"
        )
