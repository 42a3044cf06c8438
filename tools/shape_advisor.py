"""Another name of `python -m bill.shape_advisor`."""

import sys

from utils.registry import load_object

if __name__ == "__main__":
    sys.exit(load_object("bill.shape_advisor:main")())
