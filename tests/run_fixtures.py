"""Run a file of reference values through the project: `python -m tests.run_fixtures KIND FILE.npz`.

Prints every case that differs and ends with `N passed, N failed`; exits 1 if one failed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

KINDS = ("distillation", "preprocessing")


def main(argv: list[str] | None = None) -> int:
    """Parse flags, run the cases of one file, print what differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("file", type=Path, help="FILE.npz, with FILE.json beside it")
    parser.add_argument("--device", choices=("cpu", "xla"), default="cpu")
    arguments = parser.parse_args(argv)
    runner = importlib.import_module(f"tests.fixture_runs.{arguments.kind}")
    passed, failures = runner.run(arguments.file, device=arguments.device)
    for line in failures:
        print(line)
    print(f"{passed} passed, {len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
