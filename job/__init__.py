"""The life of one run, from its configuration to its exit code.

In the order in which a run meets them: spec, resume, check, build, stream, callbacks, summary,
replica, entry. Each imports only those before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from utils.config import RunConfig


def start(config: RunConfig) -> int:
    """Check a configuration on the host, then run it on its runtime; gives the exit code."""
    # PyTorch is imported behind this door: who asks for help or mistypes a flag waits for nothing.
    from job.entry import start

    return start(config)
