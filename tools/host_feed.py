"""Another name of `python -m proofs.host_feed`."""

import sys

from utils.registry import load_object

if __name__ == "__main__":
    sys.exit(load_object("proofs.host_feed:main")())
