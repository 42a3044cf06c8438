"""Old names of the programs in `lab/`: `python -m tools.lab.NAME`."""

from lab import __path__ as __path__
