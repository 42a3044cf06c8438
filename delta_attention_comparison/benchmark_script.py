"""The name by which people start the comparison: the same as `python -m lab.delta`.

sky exec CLUSTER "python delta_attention_comparison/benchmark_script.py --on cuda --json delta.json"
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from utils.registry import load_object

    sys.exit(load_object("lab.delta.__main__:main")())
