"""Reads who holds this machine's TPU chips, and duty cycle and memory of its devices.

Both sources of the latter are optional: tpu-info reads the metrics port of the running program's
libtpu, nvidia-smi comes with the driver.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_QUERY = "--query-gpu=utilization.gpu,memory.used,memory.total"


@dataclass(frozen=True)
class DeviceUse:
    """One device of this machine."""

    duty_percent: float | None  # share of the time in which it computes; None if unknown
    used_gib: float
    total_gib: float


class Holder(NamedTuple):
    """A process that has a device file open."""

    process: str
    command: str
    file: str


def list_device_files(root: Path = Path("/")) -> list[Path]:
    """List the files that a TPU process opens: /dev/accel0 (v4), /dev/vfio/0 (v5e and later).

    An OSError if a directory exists and cannot be read. No driver is asked.
    """
    files: list[Path] = []
    for folder, pattern in (("dev", "accel[0-9]*"), ("dev/vfio", "[0-9]*")):
        with contextlib.suppress(FileNotFoundError):
            files += sorted(path for path in (root / folder).iterdir() if path.match(pattern))
    return files


def find_holders(names: set[str], root: Path = Path("/")) -> tuple[list[Holder], int]:
    """Return the processes that have one of the files open, and how many cannot be read."""
    holders: list[Holder] = []
    closed = 0
    processes = sorted(path for path in (root / "proc").iterdir() if path.match("[0-9]*"))
    for process in processes:
        try:
            held = sorted(_list_open_files(process) & names)
            if held:
                holders.append(Holder(process.name, _describe_process(process), held[0]))
        except PermissionError:
            closed += 1
        except OSError:  # ended meanwhile
            continue
    return holders, closed


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


def _list_open_files(process: Path) -> set[str]:
    paths = set()
    for entry in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            paths.add(str(entry.readlink()))
    return paths


def _describe_process(process: Path) -> str:
    """Describe a process by its command, and whether it is an orphan."""
    command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()[:60]
    with contextlib.suppress(OSError, IndexError):
        if (process / "stat").read_text().rpartition(")")[2].split()[1] == "1":
            return f"{command}, an orphan"
    return command


def _to_number(cell: str) -> float | None:
    """Parse a cell of nvidia-smi; None for [N/A]."""
    try:
        return float(cell)
    except ValueError:
        return None
