"""Starts a run on its runtime: in this process, or in several that find each other."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from utils.config.devices import DEVICES
from utils.errors import UserError
from utils.own_code import NO_CODE, OwnCode
from utils.registry import load_object
from utils.runtime.choice import choose_device
from utils.runtime.processes.children import ReplicaWork
from utils.runtime.start import get_start

if TYPE_CHECKING:
    from utils.config.execution import RuntimeSection
    from utils.runtime.base import Runtime


def launch(
    section: RuntimeSection,
    worker: Callable[..., int | None],
    *args: object,
    device: str = "",
    own_code: OwnCode = NO_CODE,
) -> int:
    """Run `worker(runtime, *args)` on every replica and return the exit code.

    `worker` must be a module-level function: replicas may be processes of their own. It returns its
    exit code, or None for 0. An empty `device` is chosen here. Each process imports `own_code`.
    """
    name = device or choose_device(section)
    start, work = get_start(name), ReplicaWork(section, worker, args, own_code)
    start.prepare_environment()
    try:
        return start.launch(_load_class(name, section), work)
    except Exception as error:
        if "RANK" in os.environ and not isinstance(error, UserError):
            # Started by torchrun, which shows the ranks' outputs mixed.
            rank, kind = os.environ["RANK"], type(error).__name__
            sys.stderr.write(f"rank {rank} failed: {kind}: {error}\n")
        raise


def create_runtime(section: RuntimeSection) -> Runtime:
    """Create the runtime of this process, for tests and tools that run one replica in place."""
    return find_runtime_class(section)(section)


def find_runtime_class(section: RuntimeSection) -> type[Runtime]:
    """Return the class of a section's runtime and prepare the environment for it."""
    name = choose_device(section)
    get_start(name).prepare_environment()
    return _load_class(name, section)


def _load_class(name: str, section: RuntimeSection) -> type[Runtime]:
    """Import the class of a runtime; the others' libraries need not be installed."""
    device = DEVICES[name]
    return load_object(device.mesh_runtime if section.parallel == "spmd" else device.runtime)
