"""Another name of `python -m proofs.host_feed`."""

from __future__ import annotations

import sys

from proofs.host_feed import main

if __name__ == "__main__":
    sys.exit(main())
