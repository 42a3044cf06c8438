"""The life of one run, from its configuration to its exit code.

In the order in which a run meets them: spec, micro_batches, resume, check, build, stream,
callbacks, summary, lineage, replica, entry. Each imports only those before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from utils.programs import pause_collection
from utils.runtime.choice import choose_device

if TYPE_CHECKING:
    from utils.config.load import RunConfig


def start(config: RunConfig) -> int:
    """Check a configuration on the host, then run it on its runtime; gives the exit code."""
    device = choose_device(config.runtime)
    # PyTorch is imported behind this door: who asks for help, mistypes a flag or names a device
    # that is not here waits for nothing.
    with pause_collection():
        from job.entry import start

    return start(config, device)
