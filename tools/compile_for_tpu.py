"""Another name of `python -m bill.compile_for_tpu`."""

import sys

from utils.registry import load_object

if __name__ == "__main__":
    sys.exit(load_object("bill.compile_for_tpu:main")())
