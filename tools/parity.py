"""Another name of `python -m proofs.parity`."""

import sys

from utils.registry import load_object

if __name__ == "__main__":
    sys.exit(load_object("proofs.parity.__main__:main")())
