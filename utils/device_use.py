"""What the devices of this machine say of themselves: share of time at work, memory.

Neither library belongs to this project: tpu-info asks the libtpu of the running program on its
metrics port, nvidia-smi is NVML's own program and comes with the driver.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from dataclasses import dataclass

# Where libtpu answers, one port for each process; as libtpu's own variable says.
_PORTS = "TPU_RUNTIME_METRICS_PORTS"
_DEFAULT_PORT = "8431"
_QUERY = "--query-gpu=utilization.gpu,memory.used,memory.total"
_PATIENCE_S = 5.0


@dataclass(frozen=True)
class DeviceUse:
    """One device of this machine.

    Args:
      duty_percent: share of the time in which it computed; none: it does not say.
    """

    duty_percent: float | None
    used_gib: float
    total_gib: float


def read_devices() -> list[DeviceUse]:
    """The TPU chips or GPUs of this machine; empty where nothing tells of any."""
    return read_tpu() or read_nvidia()


def read_tpu() -> list[DeviceUse]:
    """The TPU chips of this machine, as the programs that hold them tell."""
    try:
        from tpu_info import device, metrics
    except ImportError:
        return []
    chip_type, count = device.get_local_chips()
    if not count:
        return []
    found: list[DeviceUse] = []
    for port in os.environ.get(_PORTS, _DEFAULT_PORT).split(","):
        # gRPC's classes: no program holds the chips, or it has no port of that number.
        with contextlib.suppress(Exception):
            found += [
                DeviceUse(use.duty_cycle_pct, use.memory_usage / 2**30, use.total_memory / 2**30)
                for use in metrics.get_chip_usage(chip_type, f"localhost:{port.strip()}")
            ]
    return found


def read_nvidia(uuid: str = "") -> list[DeviceUse]:
    """The GPUs of this machine, or the one of that name."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    chosen = [f"--id={uuid}"] if uuid else []
    command = [program, _QUERY, "--format=csv,noheader,nounits", *chosen]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = []
    for line in done.stdout.splitlines() if done.returncode == 0 else []:
        duty, used, total, *_ = (_to_number(cell) for cell in f"{line},,".split(","))
        if used is not None and total is not None:
            found.append(DeviceUse(duty, used / 1024, total / 1024))
    return found


def _to_number(cell: str) -> float | None:
    """A cell of nvidia-smi, which says [N/A] of what a device does not know."""
    try:
        return float(cell)
    except ValueError:
        return None
