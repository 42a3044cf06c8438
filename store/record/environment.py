"""Reads where a run runs: versions, git commit, host and Python of this process.

`run.json` keeps the little that lists show; `environment.json` beside it all that may decide a
result: every package that the requirements pin, variables of the device's libraries, the state of
the source.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import socket
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from store.lineage.leaks import find_secret
from store.record.source import DIFF_FILE, SOURCE_ROOT, SourceState, pack_diff
from utils.json_types import JsonMapping, JsonObject
from utils.storage.json_files import write_json

ENVIRONMENT_FILE = "environment.json"

_PACKAGES = ("torch", "torch_xla", "timm", "tensorflow-cpu", "tensorflow", "tensorflow-datasets",
             "numpy")  # fmt: skip
_REQUIREMENTS = "requirements*.txt"
_PINNED = re.compile(r"^([A-Za-z0-9][\w.\-]*)==", re.MULTILINE)
# Variables that change what is computed or where; all others are nobody's business.
_VARIABLES = re.compile(
    r"(XLA|PJRT|LIBTPU|TPU|CUDA|NCCL|TORCH|PYTORCH|OMP|MKL|CUBLAS)_\w+"
    r"|TF_(CPP|XLA|ENABLE|DISABLE|NUM|FORCE|DETERMINISTIC|CUDNN|GPU)_\w+"
    r"|CPU_NUM_DEVICES|PYTHONHASHSEED|HDF5_USE_FILE_LOCKING"
)
# What run.json tells of the process; the rest of its environment is the device's.
_OF_HOST = ("python", "packages", "git_commit", "host", "cores")


def read_environment() -> JsonObject:
    """Versions, git commit, host and Python; asks git, so it takes a moment."""
    return {
        "python": platform.python_version(),
        "packages": _read_versions(_PACKAGES),
        "git_commit": _read_commit(),
        "host": socket.gethostname(),
        "cores": len(os.sched_getaffinity(0)),
    }


def write_environment(
    folder: Path, environment: JsonMapping, source: SourceState, attempt: int
) -> None:
    """Write `environment.json` of a run and the source's patch beside it, in place of older ones.

    Args:
      environment: as `run.json` holds it: this process and its device.
    """
    packages = sorted({*_PACKAGES, *read_pinned()})
    kept, refused = choose_variables(os.environ)
    told = {
        "schema_version": 2,
        "attempt": attempt,
        "python": platform.python_version(),
        "os": platform.platform(),
        "host": environment.get("host", ""),
        "cores": environment.get("cores", 0),
        "accelerator": {k: v for k, v in environment.items() if k not in _OF_HOST},
        "packages": _read_versions(packages),
        "variables": kept,
        "refused_variables": refused,
        "source": source.describe(),
    }
    path = folder / DIFF_FILE
    if source.diff:
        # Old and new may be mixed by a kill between the two: the hash in the JSON tells.
        staged = path.with_name(path.name + ".tmp")
        staged.write_bytes(pack_diff(source.diff))
        staged.replace(path)
    else:
        path.unlink(missing_ok=True)
    write_json(folder / ENVIRONMENT_FILE, told, indent=1)


def choose_variables(variables: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Those that change what is computed, and the names of those that seem to hold a secret."""
    wanted = {k: v for k, v in sorted(variables.items()) if _VARIABLES.fullmatch(k)}
    refused = [name for name, value in wanted.items() if find_secret(f"{name}={value}")]
    return {k: v for k, v in wanted.items() if k not in refused}, refused


def read_pinned(root: Path = SOURCE_ROOT) -> list[str]:
    """Names of the packages that the requirements pin."""
    files = sorted(root.glob(_REQUIREMENTS))
    return [name for file in files for name in _PINNED.findall(file.read_text(encoding="utf-8"))]


def _read_versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of those that are installed."""
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _read_commit() -> str:
    """The commit of the source tree, marked if it has changes; empty outside a repository."""
    command = ["git", "-C", str(SOURCE_ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
