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

from store.lock import LOCK_FILE
from utils.errors import UserError
from utils.log import get_logger
from utils.storage import join_place, open_folder, write_atomically

RUN_FILE = "run.json"
CONFIG_FILE = "config_resolved.yaml"
CHECKPOINTS = "checkpoints"
_PACKAGES = ("torch", "torch_xla", "timm", "tensorflow-cpu", "tensorflow", "tensorflow-datasets",
             "numpy")  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One run's directory.

    Args:
      checkpoint_root: directory or URL below which the checkpoints lie, as
        `<experiment>/<run_id>`; empty: in the run's own directory.
    """

    path: Path
    checkpoint_root: str = ""

    @property
    def checkpoints(self) -> str | Path:
        """Where its checkpoints lie."""
        if self.checkpoint_root:
            return join_place(self.checkpoint_root, self.path.parent.name, self.path.name)
        return self.path / CHECKPOINTS

    def read(self) -> dict[str, Any]:
        """What run.json says; empty before the run has begun, or if it is damaged."""
        file = self.path / RUN_FILE
        try:
            facts = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            get_logger().warning("%s is damaged and counts as empty: %s", file, error)
            return {}
        return facts if isinstance(facts, dict) else {}

    def update(self, **facts: Any) -> None:
        """Merge facts into run.json, atomically."""
        merged = {**self.read(), **facts}
        write_atomically(self.path / RUN_FILE, json.dumps(merged, indent=2) + "\n")

    def write_config(self, text: str) -> None:
        """Keep the resolved configuration."""
        (self.path / CONFIG_FILE).write_text(text, encoding="utf-8")


class RunStore:
    """All runs of one experiment.

    Args:
      output_dir: root of the store.
      experiment: directory below it.
      checkpoint_root: of its runs.
    """

    def __init__(self, output_dir: str, experiment: str, checkpoint_root: str = "") -> None:
        if not re.fullmatch(r"[\w.\-]+", experiment):
            raise UserError(
                f"run.experiment ({experiment!r}) is no directory name; use letters, digits, dots, "
                "dashes and underscores"
            )
        self.folder = Path(output_dir) / experiment
        if checkpoint_root:
            open_folder(checkpoint_root)
        self.checkpoint_root = checkpoint_root

    def get(self, run_id: str) -> Run:
        """The run of that name, begun or not."""
        return Run(self.folder / run_id, self.checkpoint_root)

    def choose(self, run_id: str, seed: int) -> Run:
        """The directory of a new run, not yet made; a free name if `run_id` is empty."""
        if run_id:
            return self.get(run_id)
        base = f"{time.strftime('%Y%m%d-%H%M%S')}-seed{seed}"
        name, count = base, 1
        while (self.folder / name).exists():
            count += 1
            name = f"{base}-{count}"
        return self.get(name)

    def find_newest(self) -> Run | None:
        """The run that was begun last; none if there is none.

        On a new machine only the checkpoints are left: then the last name that stands there.
        """
        runs = [self.get(path.parent.name) for path in self.folder.glob(f"*/{RUN_FILE}")]
        if not runs and self.checkpoint_root:
            place = join_place(self.checkpoint_root, self.folder.name)
            return next(map(self.get, reversed(open_folder(place).list_names())), None)
        return max(runs, key=_get_age, default=None)


def check_free(run: Run, *, overwrite: bool) -> None:
    """Refuse a run directory that is taken, unless it may be replaced."""
    taken = run.path.exists() and any(path.name != LOCK_FILE for path in run.path.iterdir())
    taken = taken or bool(run.checkpoint_root and open_folder(run.checkpoints).list_names())
    if taken and not overwrite:
        raise UserError(
            f"run.run_id: {run.path} exists; choose another run.run_id, --resume auto to continue "
            "it, or --run.overwrite to replace it"
        )


def begin(run: Run, config_text: str, facts: dict[str, Any], *, overwrite: bool) -> None:
    """Make the directory of a new run and write its configuration and start."""
    if overwrite and run.path.exists():
        _empty(run.path)
    if overwrite and run.checkpoint_root:
        open_folder(run.checkpoints).remove()
    run.path.mkdir(parents=True, exist_ok=True)
    others = [Run(path.parent).read() for path in run.path.parent.glob(f"*/{RUN_FILE}")]
    number = 1 + max((_get_number(other) for other in others), default=0)
    run.write_config(config_text)
    run.update(status="running", number=number, **facts)


def _empty(folder: Path) -> None:
    """Delete all but the lock, which this program holds."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK_FILE:
            path.unlink()


def _get_age(run: Run) -> tuple[int, float]:
    """Orders runs by their beginning: by number, because clocks may go back."""
    facts = run.read()
    started = facts.get("started", 0.0)
    return _get_number(facts), started if isinstance(started, int | float) else 0.0


def _get_number(facts: dict[str, Any]) -> int:
    number = facts.get("number", 0)
    return number if isinstance(number, int) else 0


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
    root = Path(__file__).resolve().parents[1]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
