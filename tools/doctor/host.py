"""Checks of the host: limits, memory, disks and clock."""

from __future__ import annotations

import ctypes
import email.utils
import re
import time
from collections.abc import Callable
from pathlib import Path

from tools.doctor.devices import count_chips
from tools.doctor.machine import GIB, GREEN, RED, ROOT, YELLOW, Finding, Machine
from utils.processor import find_vector_block

_FEW_FILES, _ENOUGH_FILES = 1024, 4096
_SMALL_SHM_GIB, _LITTLE_DISK_GIB, _ENOUGH_DISK_GIB = 1.0, 1.0, 20.0
_PROCESS_GIB = 3.0  # torch_xla, TensorFlow and batches on their way, without the shuffle buffer
_CLOCK_OFF_S, _CLOCK_WRONG_S = 5.0, 60.0
_STA_UNSYNC = 0x40
_AUTO_CACHE = "/.cache/xla_graphs"  # what runtime.compile_cache: auto means on a TPU


def check_processor(machine: Machine) -> Finding:
    """Known faults of libraries on this kind of processor, and what a run does about them."""
    name, block = find_vector_block(machine.environment, machine.root)
    if not block:
        return Finding("processor", GREEN, "no known fault of a library")
    text = (
        f"{name}: oneDNN's weight gradients of strided 1x1 convolutions of fewer than {block} "
        "channels are wrong; runtime.device=cpu computes them without a stride"
    )
    return Finding("processor", GREEN, text)


def check_open_files(machine: Machine) -> Finding:
    """The limit of open files: shards, pipes and sockets of every process."""
    limit = machine.get_open_files()
    if limit < 0 or limit >= _ENOUGH_FILES:
        text = "no limit" if limit < 0 else f"{limit}"
        return Finding("open files", GREEN, text)
    level = RED if limit < _FEW_FILES else YELLOW
    text = f"{limit} open files allowed, {_ENOUGH_FILES} are enough"
    return Finding("open files", level, text, "ulimit -n 65536")


def check_shm(machine: Machine) -> Finding:
    """/dev/shm: what processes of one host share."""
    place = machine.root / "dev/shm"
    if not place.is_dir():
        hint = "in docker add --shm-size=16g"
        return Finding("/dev/shm", RED, "there is none", hint)
    total, free = machine.get_disk(place)
    text = f"{free:.1f} GiB free of {total:.1f}"
    if total < _SMALL_SHM_GIB:
        return Finding("/dev/shm", YELLOW, text, "in docker add --shm-size=16g")
    if free < total / 20:
        return Finding(
            "/dev/shm", RED, f"{text}: full", "ls -lS /dev/shm, remove what is left over"
        )
    return Finding("/dev/shm", GREEN, text)


def check_checkpoint_disk(machine: Machine) -> Finding:
    """Space for checkpoints, where the run store is a directory."""
    output = machine.requirements.output
    if "://" in output:
        return Finding("checkpoint disk", GREEN, f"{output} is no disk of this machine")
    return _explain_disk(machine, "checkpoint disk", path=Path(output), key="--run.output_dir")


def check_cache_disk(machine: Machine) -> Finding:
    """Space for the persistent compile cache."""
    cache = machine.requirements.compile_cache
    if cache == "auto":
        cache = machine.environment.get("HOME", "") + _AUTO_CACHE if count_chips(machine) else ""
    if not cache:
        return Finding("compile cache", GREEN, "none in use: no TPU, or none wanted")
    return _explain_disk(machine, "compile cache", path=Path(cache), key="runtime.compile_cache")


def check_memory(machine: Machine) -> Finding:
    """Memory for every input process and its shuffle buffer."""
    requirements = machine.requirements
    processes = requirements.processes or max(count_chips(machine) or 1, 1)
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", machine.read("proc/meminfo"), re.MULTILINE)
    except OSError as error:
        return Finding("memory", YELLOW, f"could not look: {error}")
    if found is None:
        return Finding("memory", YELLOW, "could not look: /proc/meminfo tells no MemAvailable")
    available = int(found[1]) * 1024 / GIB
    needed = processes * (requirements.shuffle_gib + _PROCESS_GIB)
    text = (
        f"{available:.1f} GiB available; input processes: {processes}, with data.shuffle_gib "
        f"{requirements.shuffle_gib:g} and all else about {needed:.0f} GiB"
    )
    if needed <= available:
        return Finding("memory", GREEN, text)
    fits = available / processes - _PROCESS_GIB
    hint = f"--data.shuffle_gib={fits:.1f}" if fits >= 0.1 else "a machine with more memory"
    return Finding("memory", RED if needed > 2 * available else YELLOW, text, hint)


def check_clock(machine: Machine, ask_kernel: Callable[[], int] | None = None) -> Finding:
    """The clock: run names, logs of several hosts and signed requests depend on it."""
    try:
        _, date = machine.ask_metadata("instance/id")
        told = email.utils.parsedate_to_datetime(date).timestamp()
    except (OSError, TypeError, ValueError):
        return _explain_kernel_clock(ask_kernel or read_clock_status)
    off = time.time() - told
    text = f"{off:+.1f} s against the cloud's metadata server"
    if abs(off) < _CLOCK_OFF_S:
        return Finding("clock", GREEN, text)
    level = RED if abs(off) > _CLOCK_WRONG_S else YELLOW
    return Finding("clock", level, text, "sudo systemctl restart chrony")


def read_clock_status() -> int:
    """The kernel's status of its clock, as adjtimex(2) tells it.

    Raises:
      OSError: it does not tell.
    """
    # struct timex is 208 bytes on Linux/x86-64 and arm64; modes == 0 changes nothing.
    buffer = ctypes.create_string_buffer(208)
    if ctypes.CDLL(None, use_errno=True).adjtimex(buffer) < 0:
        raise OSError(ctypes.get_errno(), "adjtimex failed")
    # modes (int, padded), offset, freq, maxerror, esterror (long), then status (int).
    return int.from_bytes(buffer.raw[40:44], "little")


def _explain_kernel_clock(ask_kernel: Callable[[], int]) -> Finding:
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    try:
        status = ask_kernel()
    except (OSError, AttributeError) as error:
        return Finding("clock", YELLOW, f"{now}; could not ask the kernel: {error}")
    if status & _STA_UNSYNC:
        text = f"{now}; nobody keeps it in step, and no server of the cloud to compare it with"
        return Finding("clock", YELLOW, text, "sudo apt-get install chrony, or compare it by eye")
    return Finding("clock", GREEN, f"{now}, kept in step")


def _explain_disk(machine: Machine, name: str, *, path: Path, key: str) -> Finding:
    try:
        total, free = machine.get_disk(ROOT / path)
    except OSError as error:
        return Finding(name, RED, f"{path}: {error}", f"another {key}")
    text = f"{free:.1f} GiB free of {total:.1f} at {path}"
    if free >= _ENOUGH_DISK_GIB:
        return Finding(name, GREEN, text)
    level = RED if free < _LITTLE_DISK_GIB else YELLOW
    return Finding(name, level, text, f"remove old runs, or another {key}")
