"""A runtime executes a run: `launch` starts it, `create_runtime` gives the parts their device.

`choice` decides which runtime it is and `launcher` starts it. `base` says what a runtime can do;
`cpu`, `cuda`, `xla` and `xla_spmd` are the runtimes. `ranks` and `xla_ranks` hold what the
processes of a run do together, `group` and `processes` how they reach each other, start and end.
"""

from utils.runtime.choice import (
    bakes_numbers,
    choose_device,
    count_planned_ranks,
    describe_device,
    find_planned_ranks,
    is_silent_rank,
    prepare_environment,
)
from utils.runtime.launcher import create_runtime, find_runtime_class, launch

__all__ = [
    "bakes_numbers",
    "choose_device",
    "count_planned_ranks",
    "create_runtime",
    "describe_device",
    "find_planned_ranks",
    "find_runtime_class",
    "is_silent_rank",
    "launch",
    "prepare_environment",
]
