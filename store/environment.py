"""Reads where a run runs: versions, git commit, host and Python of this process."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import subprocess
from pathlib import Path

from utils.json_types import JsonObject

_PACKAGES = ("torch", "torch_xla", "timm", "tensorflow-cpu", "tensorflow", "tensorflow-datasets",
             "numpy")  # fmt: skip


def read_environment() -> JsonObject:
    """Versions, git commit, host and Python; asks git, so it takes a moment."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "packages": versions,
        "git_commit": _read_commit(),
        "host": socket.gethostname(),
        "cores": len(os.sched_getaffinity(0)),
    }


def _read_commit() -> str:
    """The commit of the source tree, marked if it has changes; empty outside a repository."""
    root = Path(__file__).resolve().parents[1]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
