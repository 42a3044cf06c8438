"""A cloud on this machine: stand-in programs on PATH, and the launchers as a user runs them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from train.sky import cluster

ROOT = Path(__file__).resolve().parents[2]
STAND_INS = ROOT / "tests" / "support" / "stand_ins"
needs_git = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")


class Cloud:
    """The stand-ins' state, their recorded calls, and programs that see nothing else."""

    def __init__(self, folder: Path, hosts: int = 1) -> None:
        self.folder = folder
        self.hosts = hosts
        self.environment = {
            **os.environ,
            "PATH": f"{STAND_INS}:{Path(sys.executable).parent}:/usr/bin:/bin",
            "STAND_IN_STATE": str(folder),
            "STAND_IN_HOSTS": str(hosts),
            "STAND_IN_PYTHON": sys.executable,
            "STAND_IN_PORT": str(find_port()),
            "PYTHONUNBUFFERED": "1",
        }

    def start(self, *words: str) -> subprocess.Popen[str]:
        """`python -m WORDS`, both outputs in one pipe."""
        return subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            env=self.environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`python -m WORDS` to its end."""
        process = self.start(*words)
        output, _ = process.communicate()
        return subprocess.CompletedProcess(words, process.returncode, output, "")

    def create(self, name: str = "pod", **facts: Any) -> None:
        """A TPU VM that is there already."""
        self.save(
            "tpu-vm",
            {
                name: {
                    "name": name,
                    "state": "READY",
                    "health": "HEALTHY",
                    "acceleratorType": "v5litepod-16",
                    "runtimeVersion": "v2-alpha-tpuv5-lite",
                    "networkEndpoints": [
                        {"ipAddress": f"10.0.0.{n + 2}"} for n in range(self.hosts)
                    ],
                    **facts,
                }
            },
        )

    def save(self, what: str, found: dict[str, Any]) -> None:
        """Set the stand-ins' state."""
        (self.folder / f"{what}.json").write_text(json.dumps(found))

    def load(self, what: str) -> dict[str, Any]:
        """The stand-ins' state."""
        path = self.folder / f"{what}.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def get_calls(self) -> list[list[str]]:
        """Every command that the stand-ins have seen, in order."""
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def get_verbs(self) -> list[str]:
        """The calls of gcloud, by kind and verb."""
        return [" ".join(call[3:5]) for call in self.get_calls() if call[0] == "gcloud"]

    def get_home(self, worker: int) -> Path:
        """The home directory of a worker."""
        return self.folder / f"host{worker}"


def create_sky_cloud(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    """The programs on PATH; names and rendered tasks go to a scratch tree, the template stays."""
    made = Cloud(folder)
    for name in ("PATH", "STAND_IN_STATE"):
        monkeypatch.setenv(name, made.environment[name])
    monkeypatch.setattr(cluster, "NAME_FILE", folder / ".cluster_name")
    monkeypatch.setattr(cluster, "_OLD_NAME_FILE", folder / "old/.cluster_name")
    monkeypatch.setattr(cluster, "RENDERED", str(folder / "rendered.yaml"))
    monkeypatch.delenv("OUTPUT_DIR", raising=False)
    return made


def find_port() -> int:
    """A port that is free now."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]
