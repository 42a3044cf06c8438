"""Another name of `python -m tools.cache write`."""

from __future__ import annotations

import sys

from tools.cache.__main__ import main as run_cache


def main(argv: list[str] | None = None) -> int:
    """As `tools.cache write`."""
    return run_cache(["write", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
