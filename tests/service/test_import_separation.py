"""The trainer imports nothing of the service, and the service nothing that trains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WEB = (
    "service",
    "fastapi",
    "starlette",
    "uvicorn",
    "plotly",
    "tsdownsample",
    "optuna",
    "sqlalchemy",
)
TRAINING = ("torch", "torch_xla", "tensorflow", "jax", "timm", "engine", "job", "models", "tasks")


def list_modules(code: str) -> set[str]:
    """The packages that are loaded after some code, in a process of its own."""
    code += "\nimport sys\nprint('\\n'.join(sorted({n.partition('.')[0] for n in sys.modules})))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_a_trainer_loads_nothing_of_the_service():
    """All that a run imports, without running it; Jinja2 comes with torch."""
    found = list_modules("import main, job.entry")
    assert "engine" in found
    assert not found & set(WEB)


def test_the_service_loads_nothing_that_trains():
    found = list_modules("import service.web.app, service.web.server, service.checker, tools.serve")
    assert "fastapi" in found
    assert not found & set(TRAINING)


def test_the_client_uses_only_the_standard_library():
    found = list_modules("import service.client") - list_modules("")
    assert found - set(sys.stdlib_module_names) == {"service", "utils"}
