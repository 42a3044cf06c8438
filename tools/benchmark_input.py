"""Another name of `python -m proofs.benchmark_input`."""

from __future__ import annotations

import sys

from proofs.benchmark_input import main

if __name__ == "__main__":
    sys.exit(main())
