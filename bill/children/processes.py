"""Child processes of these tools: they end with the process that started them, or in its time."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from importlib.metadata import distributions
from pathlib import Path
from typing import IO

from utils.errors import UserError

_STARTER = Path(__file__).with_name("start_child.py")


class TimeLimitError(UserError):
    """A compilation took too long, which tells nothing of its program."""


def run_child(
    script: Path,
    request: Path,
    *,
    time_limit_s: float = math.inf,
    output: IO[str] | None = None,
    environment: dict[str, str] | None = None,
    venv: Path | None = None,
) -> int:
    """Exit code of a Python program, which is ended when the time is over.

    Args:
      request: its argument.
      output: where it writes to; None: where this process does.
      environment: what it has beside this process's.
      venv: the environment of packages that it runs in; None: this process's.

    Raises:
      TimeLimitError: it was ended.
    """
    python, variables = sys.executable, {**os.environ, **(environment or {})}
    if venv is not None and venv != Path(sys.prefix):
        python = str(venv / "bin" / "python")
        variables.pop("PYTHONPATH", None)  # packages of this process's
    command = [python, str(_STARTER), str(os.getpid()), str(script), str(request)]
    child = subprocess.Popen(command, stdout=output, stderr=output, env=variables)
    try:
        return _wait(child, time.monotonic(), time_limit_s)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()


def find_venv(suffix: str = "") -> Path:
    """Return `.venv`, in which this process runs, or the one beside it that has the suffix."""
    return Path(sys.prefix.removesuffix("-tpu") + suffix)


def read_versions(venv: Path) -> dict[str, str]:
    """Read package -> version of an environment, with `_` in names; empty if it is not there."""
    folders = [str(folder) for folder in venv.glob("lib/python*/site-packages")]
    packages = distributions() if venv == Path(sys.prefix) else distributions(path=folders)
    return {package.name.replace("-", "_"): package.version for package in packages}


def _wait(child: subprocess.Popen[bytes], began: float, time_limit_s: float) -> int:
    while True:
        try:
            return child.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            passed = time.monotonic() - began
            _show_progress(passed)
        if passed > time_limit_s:
            raise TimeLimitError(
                f"the TPU compiler did not finish within --time-limit ({time_limit_s:.0f} s); "
                "raise it, or compile fewer chips: 16 and 64 tell as much as 256"
            )


def _show_progress(seconds: float) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\rin work: {seconds:.0f} s")
        sys.stderr.flush()
    elif int(seconds) % 30 == 0:
        sys.stderr.write(f"in work: {seconds:.0f} s\n")
