"""Old names of the programs in `proofs/`: `python -m tools.proofs.NAME`."""

from proofs import __path__ as __path__
