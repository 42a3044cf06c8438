"""Another name of `python -m proofs.multihost_loader`, which also runs by its path."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Run by its path, this folder must make way: its names hide the library's.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from utils.registry import load_object

    sys.exit(load_object("proofs.multihost_loader.__main__:main")())
