"""Another name of `python -m proofs.benchmark`."""

import sys

from utils.registry import load_object

if __name__ == "__main__":
    sys.exit(load_object("proofs.benchmark.__main__:main")())
