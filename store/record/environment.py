"""Reads the environment of a run: versions, git commit, host and Python of this process.

`run.json` has the few fields that lists show. `environment.json` has everything that may affect a
result: each package that the requirements pin, variables of device libraries, the source's state.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import socket
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from store.lineage.leaks import find_secret
from store.record.source import DIFF_FILE, SourceState, pack_diff
from utils.json_types import JsonMapping, JsonObject
from utils.storage.installation import PRODUCT, ROOT, is_installed
from utils.storage.json_files import write_json

ENVIRONMENT_FILE = "environment.json"
_PACKAGES = (
    "torch",
    "torch_xla",
    "timm",
    "tensorflow-cpu",
    "tensorflow",
    "tensorflow-datasets",
    "numpy",
    PRODUCT,
)
_PINNED = re.compile(r"^([A-Za-z0-9][\w.\-]*)==", re.MULTILINE)
# Variables that change what is computed or where; all others stay private.
_VARIABLES = re.compile(
    r"(XLA|PJRT|LIBTPU|TPU|CUDA|NCCL|TORCH|PYTORCH|OMP|MKL|CUBLAS)_\w+"
    r"|TF_(CPP|XLA|ENABLE|DISABLE|NUM|FORCE|DETERMINISTIC|CUDNN|GPU)_\w+"
    r"|CPU_NUM_DEVICES|PYTHONHASHSEED|HDF5_USE_FILE_LOCKING"
)
# Fields of the process in `run.json`; the rest of its environment is the device's.
_OF_HOST = ("python", "packages", "git_commit", "host", "cores", "imports")


def read_environment() -> JsonObject:
    """Read versions, git commit, host and Python; takes a moment, because it runs git."""
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
    """Write `environment.json` and the source's patch; `environment` is that of `run.json`."""
    packages = sorted({*_PACKAGES, *read_pinned()})
    kept, refused = choose_variables(os.environ)
    content = {
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
        **({"imports": environment["imports"]} if "imports" in environment else {}),
    }
    path = folder / DIFF_FILE
    if source.diff:
        # A kill between the two writes may mix old and new: the hash in the JSON shows it.
        staged = path.with_name(path.name + ".tmp")
        staged.write_bytes(pack_diff(source.diff))
        staged.replace(path)
    else:
        path.unlink(missing_ok=True)
    write_json(folder / ENVIRONMENT_FILE, content, indent=1)


def choose_variables(variables: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables that change what is computed, and the names of probable secrets."""
    wanted = {k: v for k, v in sorted(variables.items()) if _VARIABLES.fullmatch(k)}
    refused = [name for name, value in wanted.items() if find_secret(f"{name}={value}")]
    return {k: v for k, v in wanted.items() if k not in refused}, refused


def read_pinned(root: Path = ROOT) -> list[str]:
    """List the packages that the requirements pin."""
    files = sorted(root.glob("requirements*.txt"))
    return [name for file in files for name in _PINNED.findall(file.read_text(encoding="utf-8"))]


def _read_versions(packages: Iterable[str]) -> dict[str, str]:
    versions = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _read_commit() -> str:
    """Return the commit of the source tree, marked if it has changes; "" outside a repository."""
    if is_installed():
        return ""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
