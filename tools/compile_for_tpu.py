"""Another name of `python -m bill.compile_for_tpu`."""

from __future__ import annotations

import sys

from bill.compile_for_tpu import main

if __name__ == "__main__":
    sys.exit(main())
