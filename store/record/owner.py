"""Who writes to a run: what a lock says of its owner, and words for it."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import psutil

from utils.json_types import JsonObject


def name_owner(owner: JsonObject) -> str:
    """Process, host and start, in words."""
    started = owner.get("started")
    since = ""
    if isinstance(started, int | float):
        since = time.strftime(", started %Y-%m-%d %H:%M:%S", time.localtime(started))
    return f"process {owner.get('pid', '?')} on {owner.get('host', 'an unknown host')}{since}"


def explain(place: str | Path, owner: JsonObject) -> str:
    """Why a run cannot be had, and the way out."""
    return (
        f"run.run_id: {place} is being written by {name_owner(owner)}; wait for it, stop it, or "
        "choose another run.run_id"
    )


def describe_self() -> JsonObject:
    """What a lock says of this program."""
    return {
        "host": socket.gethostname(),
        "machine": _get_machine(),
        "pid": os.getpid(),
        "started": time.time(),
    }


def is_of_this_machine(owner: JsonObject) -> bool:
    """Whether an owner's process number means something here: same boot, same container."""
    return bool(owner) and owner.get("machine") == _get_machine()


def is_running(owner: JsonObject) -> bool:
    """Whether an owner of this machine is still at work."""
    try:
        # A process that began after the owner wrote its name has taken over its number.
        return psutil.Process(owner["pid"]).create_time() <= owner["started"] + 1.0
    except (psutil.Error, KeyError, TypeError, ValueError):
        return False


def _get_machine() -> str:
    """One boot of one machine, or container: names of hosts are given twice."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()
