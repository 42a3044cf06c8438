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
    """Check a configuration on the host, then run it on its runtime; return the exit code."""
    device = choose_device(config.runtime)
    # PyTorch is imported only now, so that --help and errors of flags or devices are immediate.
    with pause_collection():
        from job.entry import start

    return start(config, device)
