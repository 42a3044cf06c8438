"""Runs a program that dies with the process that started it: `start_child.py PARENT FILE REQUEST`.

A program of its own and no hook between fork and exec, because a parent may have threads. Imports
no other file of this project; the program may.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Ask Linux to kill this process when its parent is gone, then become the program."""
    parent, script, *_ = argv
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit("the process that started this one is gone")
    sys.argv = argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
