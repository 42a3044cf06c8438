"""Old names of the programs in `proofs/`: `python -m tools.proofs.NAME`."""

import proofs
import proofs.tables

__path__ = [*proofs.__path__, *proofs.tables.__path__]
