"""Reads duty cycle and memory of this machine's devices.

Both sources are optional: tpu-info reads the metrics port of the running program's libtpu,
nvidia-smi comes with the driver.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from dataclasses import dataclass

_QUERY = "--query-gpu=utilization.gpu,memory.used,memory.total"


@dataclass(frozen=True)
class DeviceUse:
    """One device of this machine."""

    duty_percent: float | None  # share of the time in which it computes; None if unknown
    used_gib: float
    total_gib: float


def read_devices() -> list[DeviceUse]:
    """Read the TPU chips or GPUs of this machine; empty if none can be read."""
    return read_tpu() or read_nvidia()


def read_tpu() -> list[DeviceUse]:
    """Read the TPU chips of this machine from the programs that hold them."""
    try:
        from tpu_info import device, metrics
    except ImportError:
        return []
    chip_type, count = device.get_local_chips()
    if not count:
        return []
    uses: list[DeviceUse] = []
    # libtpu's metrics ports, one for each process.
    for port in os.environ.get("TPU_RUNTIME_METRICS_PORTS", "8431").split(","):
        # gRPC's errors: no program holds the chips, or it has no port of that number.
        with contextlib.suppress(Exception):
            uses += [
                DeviceUse(use.duty_cycle_pct, use.memory_usage / 2**30, use.total_memory / 2**30)
                for use in metrics.get_chip_usage(chip_type, f"localhost:{port.strip()}")
            ]
    return uses


def read_nvidia(uuid: str = "") -> list[DeviceUse]:
    """Read the GPUs of this machine, or the one with a UUID."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    chosen = [f"--id={uuid}"] if uuid else []
    command = [program, _QUERY, "--format=csv,noheader,nounits", *chosen]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5.0)
    except (OSError, subprocess.TimeoutExpired):
        return []
    uses = []
    for line in done.stdout.splitlines() if done.returncode == 0 else []:
        duty, used, total, *_ = (_to_number(cell) for cell in f"{line},,".split(","))
        if used is not None and total is not None:
            uses.append(DeviceUse(duty, used / 1024, total / 1024))
    return uses


def _to_number(cell: str) -> float | None:
    """Parse a cell of nvidia-smi; None for [N/A]."""
    try:
        return float(cell)
    except ValueError:
        return None
