"""Another name of `python -m bill.shape_advisor`."""

from __future__ import annotations

import sys

from bill.shape_advisor import main

if __name__ == "__main__":
    sys.exit(main())
