"""Run directories: `<output_dir>/<experiment>/<run_id>/`."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.errors import UserError

RUN_FILE = "run.json"
CONFIG_FILE = "config_resolved.yaml"
CHECKPOINTS = "checkpoints"
_PACKAGES = ("torch", "torch_xla", "timm", "tensorflow-cpu", "tensorflow", "tensorflow-datasets",
             "numpy")  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One run's directory."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Where its checkpoints lie."""
        return self.path / CHECKPOINTS

    def read(self) -> dict[str, Any]:
        """What run.json says; empty before the run has begun."""
        file = self.path / RUN_FILE
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

    def update(self, **facts: Any) -> None:
        """Merge facts into run.json, atomically."""
        merged = {**self.read(), **facts}
        temporary = self.path / (RUN_FILE + ".tmp")
        temporary.write_text(json.dumps(merged, indent=2) + "\n", encoding="utf-8")
        temporary.replace(self.path / RUN_FILE)

    def write_config(self, text: str) -> None:
        """Keep the resolved configuration."""
        (self.path / CONFIG_FILE).write_text(text, encoding="utf-8")


class RunStore:
    """All runs of one experiment.

    Args:
      output_dir: root of the store.
      experiment: directory below it.
    """

    def __init__(self, output_dir: str, experiment: str) -> None:
        if not re.fullmatch(r"[\w.\-]+", experiment):
            raise UserError(
                f"run.experiment ({experiment!r}) is no directory name; use letters, digits, dots, "
                "dashes and underscores"
            )
        self.folder = Path(output_dir) / experiment

    def choose(self, run_id: str, seed: int) -> Run:
        """The directory of a new run, not yet made; a free name if `run_id` is empty."""
        if run_id:
            return Run(self.folder / run_id)
        base = f"{time.strftime('%Y%m%d-%H%M%S')}-seed{seed}"
        name, count = base, 1
        while (self.folder / name).exists():
            count += 1
            name = f"{base}-{count}"
        return Run(self.folder / name)

    def find_newest(self) -> Run | None:
        """The run that was begun last; none if there is none."""
        runs = [Run(path.parent) for path in self.folder.glob(f"*/{RUN_FILE}")]
        return max(runs, key=lambda run: run.read().get("started", 0.0), default=None)


def check_free(run: Run, *, overwrite: bool) -> None:
    """Refuse a run directory that is taken, unless it may be replaced."""
    if run.path.exists() and any(run.path.iterdir()) and not overwrite:
        raise UserError(
            f"run.run_id: {run.path} exists; choose another run.run_id, --resume auto to continue "
            "it, or --run.overwrite to replace it"
        )


def begin(run: Run, config_text: str, facts: dict[str, Any], *, overwrite: bool) -> None:
    """Make the directory of a new run and write its configuration and start."""
    if overwrite and run.path.exists():
        shutil.rmtree(run.path)
    run.path.mkdir(parents=True, exist_ok=True)
    run.write_config(config_text)
    run.update(status="running", **facts)


def get_environment() -> dict[str, Any]:
    """Versions, git commit, host and Python of this process."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "packages": versions,
        "git_commit": _get_commit(),
        "host": socket.gethostname(),
        "cores": len(os.sched_getaffinity(0)),
    }


def _get_commit() -> str:
    """The commit of the source tree, marked if it has changes; empty outside a repository."""
    root = Path(__file__).resolve().parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
