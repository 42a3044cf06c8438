"""The face of the installed package: `tpudistil VERB ...` runs a program of this tree.

In the wheel this file is `tpudistil/__init__.py`, and everything else lies beside it. Its folder
comes first on the path of this process and, by the environment, of its children, so that names such
as `datasets` and `utils` are those of this tree here, and in no other program.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> int:
    """Run the verb that the command line names; return the exit code."""
    folder = str(Path(__file__).resolve().parent)
    sys.path.insert(0, folder)
    above = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, above]))
    # `python -m` of a child would look in the current directory first.
    os.environ["PYTHONSAFEPATH"] = "1"
    # Where torch_tpu is installed, `import torch` would open libtpu, whatever the device.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

    from tools.__main__ import run_verb

    return run_verb(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
