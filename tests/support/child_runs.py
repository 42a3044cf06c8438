"""Runs of main.py in processes of their own, as a user starts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from store.record.history import read_metrics

ROOT = Path(__file__).resolve().parents[2]
# Several runs in one fresh process, each with the flags of one list.
_SERIES = "import json, sys, main; sys.exit(max(main.main(a) for a in json.loads(sys.argv[1])))"


def get_command(flags: Sequence[str]) -> list[str]:
    """`python main.py` with flags."""
    return [sys.executable, "main.py", *flags]


def get_environment() -> dict[str, str]:
    """This process's environment, with XLA on the CPU where nothing else is said."""
    return {"PJRT_DEVICE": "CPU", **os.environ, "PYTHONUNBUFFERED": "1"}


def listen() -> None:
    """For a child about to start: what is started in the background is born deaf to Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_main(flags: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """`python main.py` to its end."""
    return subprocess.run(
        get_command(flags), cwd=ROOT, env=get_environment(), capture_output=True, text=True
    )


def run_series(runs: Sequence[Sequence[str]]) -> subprocess.CompletedProcess[str]:
    """Several runs one after the other in one new process; its code is the highest of theirs."""
    command = [sys.executable, "-c", _SERIES, json.dumps([list(flags) for flags in runs])]
    return subprocess.run(command, cwd=ROOT, env=get_environment(), capture_output=True, text=True)


def list_help_imports(script: str, folder: Path) -> list[str]:
    """Those of tensorflow and torch that `--help` of a script loads, started in a folder."""
    program = (
        "import sys, runpy; sys.argv = ['x', '--help']\n"
        f"try: runpy.run_path({script!r}, run_name='__main__')\n"
        "except SystemExit: print('|', *{'tensorflow', 'torch'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=True
    )
    return sorted(done.stdout.rpartition("|")[2].split())


def read_losses(run: Path, term: str = "total") -> list[float]:
    """A term of the loss at each log point of a run's training."""
    return [line[f"loss/{term}"] for line in read_metrics(run) if line["kind"] == "train"]
