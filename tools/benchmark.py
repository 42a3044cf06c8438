"""Another name of `python -m proofs.benchmark`."""

from __future__ import annotations

import sys

from proofs.benchmark.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
