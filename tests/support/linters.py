"""The linters of requirements-dev.txt that are programs."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest


def find_linter(name: str) -> str:
    """Find a linter beside this Python or on PATH; skip the test if it is not installed."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; bash run_commands.sh setup --dev")
    return found
