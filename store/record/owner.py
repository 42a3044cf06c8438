"""The owner of a run's lock: its description, and whether it still runs."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import psutil

from utils.json_types import JsonObject


def name_owner(owner: JsonObject) -> str:
    """Describe process, host and start."""
    started = owner.get("started")
    since = ""
    if isinstance(started, int | float):
        since = time.strftime(", started %Y-%m-%d %H:%M:%S", time.localtime(started))
    return f"process {owner.get('pid', '?')} on {owner.get('host', 'an unknown host')}{since}"


def explain(place: str | Path, owner: JsonObject) -> str:
    """Return the error for a run that another program writes."""
    return (
        f"run.run_id: {place} is being written by {name_owner(owner)}; wait for it, stop it, or "
        "choose another run.run_id"
    )


def describe_self() -> JsonObject:
    """Describe this program for a lock."""
    return {"host": socket.gethostname(), "machine": _get_machine(), "pid": os.getpid(),
            "started": time.time()}  # fmt: skip


def is_of_this_machine(owner: JsonObject) -> bool:
    """Return whether an owner's process number is valid here: same boot, same container."""
    return bool(owner) and owner.get("machine") == _get_machine()


def is_running(owner: JsonObject) -> bool:
    """Return whether an owner of this machine still runs."""
    try:
        # A process that began after the owner wrote its name has reused its number.
        return psutil.Process(owner["pid"]).create_time() <= owner["started"] + 1.0
    except (psutil.Error, KeyError, TypeError, ValueError):
        return False


def _get_machine() -> str:
    """Return an id of this boot of a machine or container: host names are not unique."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()
