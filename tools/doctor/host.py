"""Checks of the host: limits, memory, disks and clock."""

from __future__ import annotations

import ctypes
import email.utils
import re
import time
from collections.abc import Callable
from pathlib import Path

from tools.doctor.devices import count_chips
from tools.doctor.machine import GIB, RED, YELLOW, Finding, Machine, green, red, yellow
from utils.processor import find_vector_block
from utils.storage.installation import get_workplace

_FEW_FILES, _ENOUGH_FILES = 1024, 4096
_SMALL_SHM_GIB, _LITTLE_DISK_GIB, _ENOUGH_DISK_GIB = 1.0, 1.0, 20.0
_PROCESS_GIB = 3.0  # torch_xla, TensorFlow and prefetched batches, without the shuffle buffer
_CLOCK_OFF_S, _CLOCK_WRONG_S = 5.0, 60.0
_STA_UNSYNC = 0x40
_AUTO_CACHE = "/.cache/xla_graphs"  # runtime.compile_cache: auto on a TPU


def check_processor(machine: Machine) -> Finding:
    """Check known faults of libraries on this processor, and what a run does about them."""
    name, block = find_vector_block(machine.environment, machine.root)
    if not block:
        return green("no known fault of a library")
    return green(
        f"{name}: oneDNN's weight gradients of strided 1x1 convolutions of fewer than {block} "
        "channels are wrong; runtime.device=cpu computes them without a stride"
    )


def check_open_files(machine: Machine) -> Finding:
    """Check the limit of open files: shards, pipes and sockets of every process."""
    limit = machine.get_open_files()
    if limit < 0 or limit >= _ENOUGH_FILES:
        return green("no limit" if limit < 0 else f"{limit}")
    text = f"{limit} open files allowed, {_ENOUGH_FILES} are enough"
    return Finding("", RED if limit < _FEW_FILES else YELLOW, text, "ulimit -n 65536")


def check_shm(machine: Machine) -> Finding:
    """Check /dev/shm, which processes of one host share."""
    path = machine.root / "dev/shm"
    if not path.is_dir():
        return red("missing", "in docker add --shm-size=16g")
    total, free = machine.get_disk(path)
    text = f"{free:.1f} GiB free of {total:.1f}"
    if total < _SMALL_SHM_GIB:
        return yellow(text, "in docker add --shm-size=16g")
    if free < total / 20:
        return red(f"{text}: full", "ls -lS /dev/shm, remove leftover files")
    return green(text)


def check_checkpoint_disk(machine: Machine) -> Finding:
    """Check the space for checkpoints, if the run store is a directory."""
    output = machine.requirements.output
    if "://" in output:
        return green(f"{output} is no disk of this machine")
    return _explain_disk(machine, path=Path(output), key="--run.output_dir")


def check_cache_disk(machine: Machine) -> Finding:
    """Check the space for the persistent compile cache."""
    cache = machine.requirements.compile_cache
    if cache == "auto":
        cache = machine.environment.get("HOME", "") + _AUTO_CACHE if count_chips(machine) else ""
    if not cache:
        return green("none in use: no TPU, or none wanted")
    return _explain_disk(machine, path=Path(cache), key="runtime.compile_cache")


def check_memory(machine: Machine) -> Finding:
    """Check the memory for every input process and its shuffle buffer."""
    requirements = machine.requirements
    processes = requirements.processes or max(count_chips(machine) or 1, 1)
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", machine.read("proc/meminfo"), re.MULTILINE)
    except OSError as error:
        return yellow(f"could not look: {error}")
    if match is None:
        return yellow("could not look: /proc/meminfo has no MemAvailable")
    available = int(match[1]) * 1024 / GIB
    needed = processes * (requirements.shuffle_gib + _PROCESS_GIB)
    text = (
        f"{available:.1f} GiB available; input processes: {processes}, with data.shuffle_gib "
        f"{requirements.shuffle_gib:g} and all else about {needed:.0f} GiB"
    )
    if needed <= available:
        return green(text)
    fits = available / processes - _PROCESS_GIB
    hint = f"--data.shuffle_gib={fits:.1f}" if fits >= 0.1 else "a machine with more memory"
    return Finding("", RED if needed > 2 * available else YELLOW, text, hint)


def check_clock(machine: Machine, read_status: Callable[[], int] | None = None) -> Finding:
    """Check the clock: run names, logs of several hosts and signed requests depend on it."""
    try:
        _, date = machine.fetch_metadata("instance/id")
        off = time.time() - email.utils.parsedate_to_datetime(date).timestamp()
    except (OSError, TypeError, ValueError):
        return _explain_kernel_clock(read_status or read_clock_status)
    text = f"{off:+.1f} s against the cloud's metadata server"
    if abs(off) < _CLOCK_OFF_S:
        return green(text)
    level = RED if abs(off) > _CLOCK_WRONG_S else YELLOW
    return Finding("", level, text, "sudo systemctl restart chrony")


def read_clock_status() -> int:
    """Read the kernel's status of its clock by adjtimex(2); an OSError if that fails."""
    # struct timex is 208 bytes on Linux/x86-64 and arm64; modes == 0 changes nothing.
    buffer = ctypes.create_string_buffer(208)
    if ctypes.CDLL(None, use_errno=True).adjtimex(buffer) < 0:
        raise OSError(ctypes.get_errno(), "adjtimex failed")
    # modes (int, padded), offset, freq, maxerror, esterror (long), then status (int).
    return int.from_bytes(buffer.raw[40:44], "little")


def _explain_kernel_clock(read_status: Callable[[], int]) -> Finding:
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    try:
        status = read_status()
    except (OSError, AttributeError) as error:
        return yellow(f"{now}; could not read the status of the kernel: {error}")
    if status & _STA_UNSYNC:
        text = f"{now}; not synchronised, and no server of the cloud to compare it with"
        return yellow(text, "sudo apt-get install chrony, or compare it by eye")
    return green(f"{now}, synchronised")


def _explain_disk(machine: Machine, *, path: Path, key: str) -> Finding:
    try:
        total, free = machine.get_disk(get_workplace() / path)
    except OSError as error:
        return red(f"{path}: {error}", f"another {key}")
    text = f"{free:.1f} GiB free of {total:.1f} at {path}"
    if free >= _ENOUGH_DISK_GIB:
        return green(text)
    level = RED if free < _LITTLE_DISK_GIB else YELLOW
    return Finding("", level, text, f"remove old runs, or another {key}")
